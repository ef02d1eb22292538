"""MXNet 1.9 uses names that numpy and SciPy have deprecated: what it is warned of is no error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mxnet


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """What one test leaves in MXNet's engine, errors too, is no matter of the next."""
    yield
    try:
        mxnet.nd.waitall()
    except Exception:
        pass  # a test's own, which it asked for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(r"ignore::DeprecationWarning:mxnet\."))
