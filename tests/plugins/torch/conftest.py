"""What tests leave in torch itself is put right after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_being_compiled() -> Iterator[None]:
    """torch has one flag in a process that says whether code is being compiled. Ranks that are threads and compile at once may
    leave it set."""
    yield
    compiler: Any = torch.compiler
    compiler._is_compiling_flag = False
