"""The output of a comparison of systems: its table, warnings, and the result file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .arguments import CLIPS
from .measure import interval_words
from .results import table, write
from .rows import Row, disturbed, wrong

COLUMNS = {
    "system": "system",
    "config": "config",
    "median": "ms/step",
    "low": "low",
    "high": "high",
    "bound": "T*",
    "slowed_bound": "T* slowed",
    "efficiency": "T*/T",
    "speedup_vs_ddp": "vs ddp",
    "speedup_vs_ddp_tuned": "vs tuned",
    "possible_speedup_vs_ddp": "possible",
    "exposed": "exposed",
    "cpu_seconds_per_step": "CPU s/step",
    "host_cores": "cores there",
    "max_difference": "max diff",
}


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The conditions, which all rows share, and the table."""
    return f"{heading(rows)}\n{table([shown(row) for row in rows], COLUMNS)}"


def heading(rows: Sequence[Mapping[str, Any]]) -> str:
    row = rows[0]
    where = f"{row['servers']} separate servers" if row["servers"] else "a shard on every worker"
    if all(each["transport"] != "ps" for each in rows):
        where = "collectives"
    kind = "EMULATED" if row["emulated"] else "REAL"
    lines = [
        f"{kind} {row['model']}, {row['gradient_bytes'] / 1e6:.1f} MB of gradients, {row['workers']} workers, {where}, "
        f"link {row['link']}: {row['link_bytes_per_second'] / 1e6:.1f} MB/s of payload by plain TCP",
        f"compute {1000 * row['compute_seconds']:.0f} ms, communication {1000 * row['comm_seconds']:.0f} ms, "
        f"rho {row['rho']:.2f}; T*: no schedule can be faster; ms/step with the "
        f"{interval_words(row['step_seconds']['count'])}",
    ]
    if row.get("slowdown"):
        lines.append(
            f"while the links are full with plain TCP, computation takes {row['slowdown']:.3f} times as long: T* slowed is the "
            "bound with that"
        )
    if row["clip"]:
        lines.append(
            f"{CLIPS[row['clip']]}: every update needs all averages, and T* is the bound of such loops; it would be "
            f"{1000 * row['unclipped_bound_seconds']:.0f} ms without"
        )
    if row["stands_for"]:
        real = row["stands_for"]
        lines.append(
            f"stands for {real['gradient_bytes'] / 1e6:.1f} MB, {1000 * real['compute_seconds']:.0f} ms of computation and "
            f"links of {real['bandwidth_bps'] / 1e9:.3g} Gbit/s; the CPU cost of messages and bytes is this machine's and "
            "is not scaled: 'cores there' is how many cores of each worker it would take"
        )
    return "\n".join(lines)


def shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
    times = row["step_seconds"]
    return {
        **row,
        **{key: 1000 * times[key] for key in ("median", "low", "high")},
        "host_cores": (row["stands_for"] or {}).get("host_cores"),
        "bound": 1000 * row["bound_seconds"],
        "slowed_bound": row.get("slowed_bound_seconds") and 1000 * row["slowed_bound_seconds"],
        "exposed": 1000 * row["exposed_seconds"],
    }


def end(rows: Sequence[Row], text: str, json: Path | None) -> int:
    """Print ``text`` and the warnings about ``rows``, and write the rows to ``json``. Returns the exit code, which is 1 if
    weights are wrong."""
    print(text)
    mistakes = wrong(rows)
    for sentence in [*disturbed(rows), *mistakes]:
        print(sentence, file=sys.stderr)
    write(json, rows)
    return 1 if mistakes else 0
