import os
import select

import pytest


@pytest.fixture
def ended():
    """A function of a pidfd: True when the process has ended, or does so within the seconds given. Closes the pidfd."""

    def wait(pidfd, seconds=60):
        try:
            return bool(select.select([pidfd], [], [], seconds)[0])
        finally:
            os.close(pidfd)

    return wait
