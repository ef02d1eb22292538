"""``python -m bench train``: one training step of several systems, in turn on one network, beside the bound."""

from __future__ import annotations

import argparse
from functools import partial

from commsched.core.world import World

from . import PROGRAM
from .harness.row_table import end, text
from .turns import add_arguments, measure_rows, options_of

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run. As a rank that a launcher has started, it does not return: the process ends."""
    from .harness.launched import end_with, launched

    world = launched(args.real)
    if world is not None:
        end_with(partial(_run, args, world), f"{PROGRAM} train", world)
    return _run(args, None)


def _run(args: argparse.Namespace, world: World | None) -> int:
    rows = measure_rows(options_of(args), world, show_progress=True)
    return end(rows, text(rows), args.json) if rows else 0
