"""``python -m bench train``: one training step of several systems, in turn on one network, beside the bound."""

from __future__ import annotations

import argparse

from .harness.row_table import end, text
from .systems import parse
from .turns import add_arguments, measure_rows, options_of, settle_steps

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    settle = settle_steps(options, [parse(name) for name in options.systems])
    steps = options.rounds * (settle + options.steps)
    print(f"{', '.join(options.systems)} take turns, {steps} steps each", flush=True)
    rows = measure_rows(options)
    return end(rows, text(rows), args.json)
