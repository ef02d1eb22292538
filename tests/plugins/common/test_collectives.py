"""Collective calls outside of steps: rank 0's arrays reach all ranks, ranks that make another call are named, and views of
registered tensors lie in the memory that is averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commsched.core.errors import ManifestMismatch
from commsched.core.manifest import Manifest, TensorSpec
from commsched.plugins.common.collectives import broadcast_arrays, gather_alike, register_flat
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing.world import run_world


def on_ranks(rank: Any) -> None:
    sessions = local_sessions(2)

    def run(index: int) -> None:
        with sessions[index] as session:
            rank(session)

    run_world(2, run, timeout_seconds=300)


def test_arrays_of_rank_0_arrive_bit_for_bit() -> None:
    def run(session: Session) -> None:
        own = [np.full((2, 2), 0.1 + session.rank), np.array([session.rank == 0]), np.empty((0, 3)), np.array(session.rank - 5)]
        received = broadcast_arrays(session, "state", own)
        assert [each.tolist() for each in received] == [[[0.1, 0.1], [0.1, 0.1]], [True], [], -5]
        assert [each.dtype for each in received] == [each.dtype for each in own]

    on_ranks(run)


def test_values_are_gathered_for_one_purpose() -> None:
    def run(session: Session) -> None:
        assert gather_alike(session, "makes the first step", session.rank, "do so on all") == [0, 1]

    on_ranks(run)


@pytest.mark.parametrize("other", ["ends", None])
def test_a_rank_that_calls_for_another_purpose_is_named(other: str | None) -> None:
    def run(session: Session) -> None:
        if session.rank == 0:
            does = other or "does something else"
            with pytest.raises(ManifestMismatch, match=f"^rank 1 {does} while rank 0 begins: do so on all$"):
                gather_alike(session, "begins", 1, "do so on all")
        elif other is None:
            session.gather(["something"])
        else:
            with pytest.raises(ManifestMismatch, match=f"^rank 0 begins while rank 1 {other}: do so on all$"):
                gather_alike(session, other, 2, "do so on all")

    on_ranks(run)


MANIFEST = Manifest(
    (
        TensorSpec("a", (2, 3), "float32"),
        TensorSpec("scale", (), "float64"),
        TensorSpec("none", (0, 4), "float32"),
        TensorSpec("b", (5,), "float32"),
    )
)


def test_views_have_their_tensors_shapes_and_get_the_averages() -> None:
    def run(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        assert [(view.shape, view.dtype.name) for view in views] == [(spec.shape, spec.dtype) for spec in MANIFEST.tensors]
        assert not any(view.any() for view in views)
        group.begin_step()
        for tensor, view in enumerate(views):
            view[...] = tensor + session.rank
            group.notify_ready(tensor)
        for tensor, view in enumerate(views):
            group.proxies[tensor].wait()
            assert (view == tensor + 0.5).all()

    on_ranks(run)


def test_an_engine_may_allocate_and_name_types_itself() -> None:
    def run(session: Session) -> None:
        allocated: list[Any] = []

        def allocate(nbytes: int) -> tuple[Any, Any]:
            allocated.append(np.zeros(nbytes, np.uint8))
            return allocated[-1], allocated[-1].data

        _, views = register_flat(session, MANIFEST, as_dtype={"float32": np.int32, "float64": np.int64}.get, allocate=allocate)
        assert [memory.nbytes for memory in allocated] == [44, 8]
        assert [view.dtype.name for view in views] == ["int32", "int64", "int32", "int32"]
        views[3][:] = 7
        assert allocated[0].view(np.int32).tolist() == [0] * 6 + [7] * 5

    on_ranks(run)
