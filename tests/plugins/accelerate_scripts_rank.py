"""One rank of scripts of Accelerate's own tests, with our Accelerator in place of theirs: accelerate_scripts_rank.py NAME..."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import accelerate
import accelerate.accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import commsched
from commsched.plugins.accelerate import Accelerator


def main() -> None:
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator  # type: ignore[misc]
    # Each script ends the process group at its end; here the next one needs it.
    end_group, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *_: None
    for name in sys.argv[1:]:
        script: Any = import_module(f"accelerate.test_utils.scripts.{name}")
        assert script.Accelerator is Accelerator
        if name == "test_sync":  # what the script itself leaves out on CPUs
            for flags in product([True, False], repeat=3):
                script.test_gradient_accumulation(*flags)
                script.test_gradient_accumulation_with_opt_and_scheduler(*flags)
        if find_spec("torchdata") is None:  # it only has data loaders, which are not ours
            script.test_stateful_dataloader = script.test_stateful_dataloader_save_state = lambda accelerator: None
        script.main()
        session = commsched.init()
        print(f"rank {session.rank} of {session.world_size} has run {name}", flush=True)
        AcceleratorState._reset_state()  # as at the beginning of a process
        GradientState._reset_state()
    end_group(PartialState())


if __name__ == "__main__":
    main()
