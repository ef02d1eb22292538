"""Comparison of measured steps with the simulator: each row of ``bench train`` with its own layer times, link and settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from commsched.simulator.profile import ITEMSIZE, LayerProfile, Profile
from commsched.simulator.scenario import Exchange, Rules

from ..harness.measure import median_absolute_error
from .row import Case
from .systems import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, SYSTEMS, ddp, rules_of

#: Up to this number of workers the simulation has full detail. With more workers a rank's own shard matters little, and full
#: detail takes long.
_DETAILED_WORKERS = 8

_BUCKETS = re.compile(r"buckets (\d+(?:\.\d+)?(?:e[+-]?\d+)?) MiB( \(default)?")


class NotSimulated(Exception):
    """The simulator has no model of the row; the message says why."""


def simulated_seconds(row: Mapping[str, Any]) -> float:
    """The simulated seconds of the step that ``row`` measured.

    Raises:
        NotSimulated: the row lacks information, or was measured under conditions that are not modelled.
    """
    if row.get("simulated"):
        raise NotSimulated("it was simulated itself")
    if "," in row["link"]:
        raise NotSimulated("its links differ, and it tells the rate of the slowest only")
    if "cap" in row["link"]:
        raise NotSimulated("a cap in the transport lets one message pass at a time, which is not modelled")
    rules = _rules(row)
    if rules.config.fusion_bytes == 1 and "tensors" not in row["layers"]:
        raise NotSimulated("it sends each tensor by itself, and the row does not tell the sizes of tensors")
    case = Case(
        _profile(row),
        row["workers"],
        row["servers"],
        row["link_bytes_per_second"],
        partition_seconds=row["per_message_seconds"] or 0.0,
        detailed=row["workers"] <= _DETAILED_WORKERS,
    )
    return case.seconds(rules)


def errors(rows: list[dict[str, Any]]) -> list[float]:
    """``simulated / measured - 1`` for each row that has both."""
    return [
        row["simulated_seconds"] / row["step_seconds"]["median"] - 1 for row in rows if row["simulated_seconds"] is not None
    ]


def typical_error(rows: list[dict[str, Any]]) -> float | None:
    """The median absolute error; None if no row was simulated."""
    pairs = [(row["step_seconds"]["median"], row["simulated_seconds"]) for row in rows if row["simulated_seconds"] is not None]
    return median_absolute_error(pairs) if pairs else None


def _profile(row: Mapping[str, Any]) -> Profile:
    layers = row["layers"]
    tensors = layers.get("tensors") or [[nbytes] if nbytes else [] for nbytes in layers["nbytes"]]
    columns = layers["names"], tensors, layers["forward_seconds"], layers["backward_seconds"]
    found = (
        LayerProfile(name, tuple((nbytes // ITEMSIZE,) for nbytes in sizes), forward, backward)
        for name, sizes, forward, backward in zip(*columns, strict=True)
    )
    return Profile(row["model"], tuple(found), "measured")


def _rules(row: Mapping[str, Any]) -> Rules:
    system, _, wanted = row["system"].partition(":")
    if "+rsag" in wanted:
        raise NotSimulated("there is no model of reduce-scatter and all-gather in order of priority")
    if system in ("ddp", "ddp-tuned"):
        match = _BUCKETS.search(row["config"])
        if match is None:
            raise NotSimulated(f"its configuration does not tell the bucket size: {row['config']!r}")
        size = float(match[1]) * 2**20
        if match[2] and "the first too" not in row["config"]:
            return ddp(max(1, round(size)), max(1, round(size * DDP_FIRST_BUCKET_BYTES / DDP_BUCKET_BYTES)))
        return ddp(max(1, round(size)))
    if system not in SYSTEMS:
        raise NotSimulated(f"there is no model of the system {system!r}")
    if row["partition_bytes"] is None or row["credit_bytes"] is None:
        raise NotSimulated("it does not tell partition and credit")
    rules = rules_of(system, row["partition_bytes"], row["credit_bytes"])
    config = replace(rules.config, partition_bytes=row["partition_bytes"], credit_bytes=row["credit_bytes"])
    # All collectives use one model, whatever decides their order: the model of a ring or of an equally fast algorithm.
    exchange = rules.exchange if row.get("transport", "ps") in ("ps", "local") else Exchange.ALL_REDUCE
    return replace(rules, config=config, exchange=exchange)
