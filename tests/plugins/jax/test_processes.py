"""A rank of a real job dies; JAX runs ahead, so what it had begun of step 2 may not have left it."""

import re
import sys

from tests import warm
from tests.jobs.job import run_job


def test_a_rank_that_dies_is_named_by_an_error_of_its_class() -> None:
    command = [sys.executable, "-m", "tests.plugins.jax.rank"]
    code, out, _ = run_job("-n", "2", "--transport", "ps", "--", *command, imports=warm.JAX)
    assert code == 7
    assert re.search(r"rank 0 was told at step [234]: PeerLost from JaxRuntimeError: rank 1\b", out)
