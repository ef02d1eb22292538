"""What rank 0 says about the examples of ``docs/examples.md`` on a network of 1 Gbit/s, for that page::

python -m tests.examples.verdicts

Each runs with two ranks on this machine, and each rank sends at 1 Gbit/s at most. Run it while nothing else computes: it takes
some two minutes.
"""

from __future__ import annotations

import subprocess
import sys

from .test_examples import EXAMPLES, NAMES


def main() -> int:
    failed = 0
    for name in NAMES:
        command = [sys.executable, "-m", "commsched", "run", "-n", "2", "--rate", "1gbit", str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        failed += done.returncode != 0
        print(f"{name}:")
        print("".join(f"  {line}\n" for line in done.stdout.splitlines() if line.startswith("commsched")), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
