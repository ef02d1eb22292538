"""``python -m bench report``: results as one HTML page that needs no other file, and as a Markdown table."""

from __future__ import annotations

import argparse
from pathlib import Path

from commsched import ConfigError

from ..harness.arguments import new_file, require_extra
from .read import read_files
from .tables import markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help=".json of train, simulate or sweep, or .jsonl of sweep --out"
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare two FILEs on the page, row by row: the second with the first"
    )
    parser.add_argument("--out", type=new_file, default="report.html", metavar="FILE", help="the page (default: report.html)")
    parser.add_argument(
        "--timeline",
        type=new_file,
        metavar="FILE",
        help="also draw one step of each system to FILE, an .svg, for the first model that has one",
    )
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="also write the table to FILE")


def run(args: argparse.Namespace) -> int:
    require_extra("report", "matplotlib", "jinja2")
    from .page import page, timeline

    if args.compare and len(args.results) != 2:
        raise ConfigError(f"--compare needs two FILEs, not {len(args.results)}")
    read = read_files(args.results)
    runs = [read_files([path]) for path in args.results] if args.compare else []
    args.out.write_text(page(read, runs), encoding="utf-8")
    if args.timeline:
        args.timeline.write_text(timeline(read), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(read.results), encoding="utf-8")
    print(f"{len(read.results)} rows: {', '.join(str(path) for path in (args.out, args.timeline, args.markdown) if path)}")
    return 0
