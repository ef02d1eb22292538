import os
import select
from collections.abc import Iterator

import pytest

from tests import warm


@pytest.fixture(autouse=True, scope="module")
def _ranks_have_imported() -> Iterator[None]:
    """The ranks that benchmarks start have PyTorch imported: no test here is about how they start."""
    with pytest.MonkeyPatch.context() as patch:
        warm.let_benchmarks_fork(patch, warm.TORCH)
        yield


@pytest.fixture
def ended():
    """A function of a pidfd: True when the process has ended, or does so within the seconds given. Closes the pidfd."""

    def wait(pidfd, seconds=60):
        try:
            return bool(select.select([pidfd], [], [], seconds)[0])
        finally:
            os.close(pidfd)

    return wait
