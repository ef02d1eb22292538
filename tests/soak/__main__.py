"""``python -m tests.soak WHAT``: tests that take minutes, so ``make test`` leaves them out. Exit code 1: one failed."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

WHAT = {
    "strikes": "one fault at a time in each configuration: who is named, and how soon",
    "chaos": "random jobs, random faults at random moments",
    "fuzz": "random and mutated bytes into everything that reads bytes from outside",
    "strangers": "garbage, silence and many connections at every port of a running job",
    "scale": "what many ranks cost rank 0, and each rank",
    "elastic": "elastic jobs: ranks and servers are lost at random moments, and training goes on",
    "recovery": "how soon an elastic job trains again after each loss, beside torchrun's restart",
    "network": "black holes, cuts, delays and flipped bits between network namespaces; needs root",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, summary in WHAT.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if sys.argv[1:2] == [name]:
            module = import_module(f"tests.soak.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args()
    return 0 if args.run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
