"""Views of registered tensors lie in the memory that is averaged."""

from __future__ import annotations

from typing import Any

import numpy as np

from commsched.core.manifest import Manifest, TensorSpec
from commsched.plugins.common.flat import register_flat
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing.world import run_world

MANIFEST = Manifest(
    (
        TensorSpec("a", (2, 3), "float32"),
        TensorSpec("scale", (), "float64"),
        TensorSpec("none", (0, 4), "float32"),
        TensorSpec("b", (5,), "float32"),
    )
)


def on_ranks(rank: Any) -> None:
    sessions = local_sessions(2)

    def run(index: int) -> None:
        with sessions[index] as session:
            rank(session)

    run_world(2, run, timeout_seconds=30)


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
