"""For all tests of JAX, and before any of them imports it."""

import os

# Compiling is most of what these tests do, and with these options takes a sixth of the processor time. What runs before what is
# decided before, but tests of that compile as ever all the same (test_overlap.py).
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_max_isa=SSE4_2",
    )
)
