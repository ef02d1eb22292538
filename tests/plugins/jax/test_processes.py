import re
import sys

from tests.jobs.job import run_job


def test_a_rank_that_dies_is_named_by_an_error_of_its_class() -> None:
    code, out, _ = run_job("-n", "2", "--transport", "ps", "--", sys.executable, "-m", "tests.plugins.jax.rank")
    assert code == 7
    assert re.search(r"rank 0 was told at step [34]: PeerLost from JaxRuntimeError: rank 1\b", out)
