"""``python -m bench COMMAND``, or ``commsched bench COMMAND``; each command is the module of that name in this package, with
``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from commsched import CommschedError

from . import PROGRAM
from .harness.processes import JobFailed

#: The exit code after Ctrl-C.
INTERRUPTED = 130

COMMANDS = {
    "demo": "train a small model with and without the scheduler over a capped link",
    "collectives": "time, bandwidth, CPU and correctness of averaging one tensor, for a transport",
    "rounds": "many back-to-back rounds of one small tensor with a slow rank; counts wrong results",
    "idle": "processor time of ranks that do nothing, and of ranks that wait for another",
    "agreement": "time, processor time and messages of agreeing on the order of collectives, by credit",
    "witness": "cost of the process that says whether a silent rank runs",
    "profile": "time the layers of a full-size model on this machine's GPU or processor",
    "train": "the time of a training step of several systems, in turn on one network, beside the bound",
    "engines": "a training step under TensorFlow, MXNet or JAX: commsched beside the engine's own systems",
    "tune": "the searchers of tuning, replayed over a measured grid of configurations, or in real jobs",
    "sweep": "train with every combination of some options, cell by cell; continues a stopped sweep",
    "report": "one HTML page with plots, and a Markdown table, from the results of train, sweep and simulate",
    "simulate": "predict steps in virtual time, from one machine to thousands; or check measurements of train",
    "transports": "the tables of docs/transports.md: all transports under the same benchmarks",
    "overhead": "microseconds of Python that core spends per partition",
    "gates": "cost of the PyTorch plugin: reading a guarded tensor, and a step of many small parameters",
    "small": "a step of many small parameters beside DDP's, between two processes",
    "elastic": "a step of an elastic job beside one of an ordinary job",
    "staging": "a step with gradients on a simulated device, whose copies take time, beside one in the host's memory",
}


#: An example of each command's arguments.
EXAMPLES = {
    "demo": "",
    "collectives": "--transport gloo --bandwidth 1gbit --sizes 4MB,16MB",
    "rounds": "--transport gloo",
    "idle": "--transport mpi",
    "agreement": "--transport gloo",
    "witness": "",
    "profile": "--model resnet50 --out resnet50.json",
    "train": "--real --model vgg16 --systems ddp,commsched --json out.json",
    "engines": "--engine jax --bandwidth 500mbit",
    "tune": "--model vgg16 --bandwidth 500mbit --out figures",
    "sweep": "--model vgg16,resnet50 --bandwidth 500mbit --rho 0.5,1,2 --out sweep.jsonl",
    "report": "out.json --out report.html --markdown table.md",
    "simulate": "--model vgg16 --bandwidth 10gbit,25gbit --workers 8,64",
    "transports": "--out results",
    "overhead": "",
    "gates": "",
    "small": "",
    "elastic": "--batches 2048",
    "staging": "--copies 12,25 --rate 1gbit",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Benchmarks of commsched.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(
                name,
                help=summary,
                description=summary,
                epilog=f"example:\n  {PROGRAM} {name} {EXAMPLES[name]}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if arguments[:1] == [name]:  # import only this command: others may need an engine
                module = import_module(f"{__package__}.{name}")
                module.add_arguments(command)
                command.set_defaults(run=module.run)
        args = parser.parse_args(arguments)
        code: int = args.run(args)
        return code
    except (CommschedError, JobFailed) as error:
        print(f"{PROGRAM} {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("bench", "commsched"):
            raise
        print(f'{PROGRAM} {arguments[0]}: this needs {error.name}: pip install "commsched[bench]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
