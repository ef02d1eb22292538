"""One rank that runs scripts one after the other: rank.py WAY OUT STEPS SCRIPT ...

WAY is ``commsched``, or ``ddp`` if the scripts want a process group of torch.distributed. What they print goes to OUT.<rank>.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    way, out, steps, *scripts = sys.argv[1:]
    torch.set_num_threads(1)
    if way == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
        dist.init_process_group("gloo")
    with open(f"{out}.{os.environ['RANK']}", "w", encoding="utf-8") as file, redirect_stdout(file):
        for script in scripts:
            print(f"script {Path(script).stem}")
            sys.argv = [script, "--steps", steps]
            runpy.run_path(script, run_name="__main__")
    if way == "ddp":
        dist.barrier()
        os._exit(0)  # gloo's threads now and then keep the interpreter from ending


if __name__ == "__main__":
    main()
