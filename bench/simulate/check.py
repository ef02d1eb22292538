"""Comparison of measured steps with the simulator: each row of ``bench train`` with its own layer times, link and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commsched.simulator.profile import ITEMSIZE, LayerProfile, Profile
from commsched.simulator.scenario import Rules

from ..harness.measure import median_absolute_error
from ..harness.simulated import NotSimulated
from ..systems import SYSTEMS
from .row import Case

#: Up to this number of workers the simulation has full detail. With more workers a rank's own shard matters little, and full
#: detail takes long.
_DETAILED_WORKERS = 8


def simulated_seconds(row: Mapping[str, Any]) -> float:
    """The simulated seconds of the step that ``row`` measured.

    Raises:
        NotSimulated: the row lacks information, or was measured under conditions that are not modelled.
    """
    if row.get("simulated"):
        raise NotSimulated("it was simulated itself")
    if "," in row["link"]:
        raise NotSimulated("its links differ, and the row has only the rate of the slowest")
    if "cap" in row["link"]:
        raise NotSimulated("a cap in the transport lets one message pass at a time, which is not modelled")
    rules = _rules(row)
    if rules.config.fusion_bytes == 1 and "tensors" not in row["layers"]:
        raise NotSimulated("it sends each tensor by itself, and the row has no sizes of tensors")
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
    system = row["system"].partition(":")[0]
    simulated = SYSTEMS[system].simulated if system in SYSTEMS else None
    if simulated is None:
        raise NotSimulated(f"there is no model of the system {system!r}")
    return (simulated.clipped() if row.get("clip") else simulated).measured(row)
