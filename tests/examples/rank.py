"""One rank that runs scripts one after the other: rank.py OUT STEPS SCRIPT ... ddp SCRIPT ...

A SCRIPT may have options behind it, in the same word. Those after ``ddp`` find a process group of torch.distributed. What they
print goes to OUT.<rank>, and so do the sizes of the gradients that commsched averages.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from contextlib import redirect_stdout

import torch.distributed as dist

import commsched
from commsched.tuner.result import size


def main() -> None:
    out, steps, *scripts = sys.argv[1:]
    with open(f"{out}.{os.environ['RANK']}", "w", encoding="utf-8") as file, redirect_stdout(file):
        commsched.init().on_register(lambda index, manifest: print(f"gradients of {size(manifest.nbytes)}"))
        for script in scripts:
            if script == "ddp":
                commsched.shutdown()
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
                dist.init_process_group("gloo")
                continue
            print(f"script {script}")
            path, *options = shlex.split(script)
            sys.argv = [path, "--steps", steps, *options]
            runpy.run_path(path, run_name="__main__")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then keep the interpreter from ending


if __name__ == "__main__":
    main()
