"""``python -m bench train``: one training step of several systems, in turn on one network, beside the bound."""

from __future__ import annotations

import argparse
from functools import partial

from commsched.core.world import World

from . import PROGRAM
from .harness.row_table import end, text
from .systems import parse
from .turns import add_arguments, measure_rows, options_of, settle_steps

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run. As a rank that a launcher has started, it does not return: the process ends."""
    from .harness.launched import end_with, launched

    world = launched(args.real)
    if world is not None:
        end_with(partial(_run, args, world), f"{PROGRAM} train", world)
    return _run(args, None)


def _run(args: argparse.Namespace, world: World | None) -> int:
    options = options_of(args)
    settle = settle_steps(options, [parse(name) for name in options.systems])
    steps = options.rounds * (settle + options.steps)
    if world is None or world.rank == 0:
        where = "" if world is None else f" on {world.world_size} ranks of {world.launcher}"
        print(f"{', '.join(options.systems)} take turns{where}, {steps} steps each", flush=True)
    rows = measure_rows(options, world, show_progress=True)
    return end(rows, text(rows), args.json) if rows else 0
