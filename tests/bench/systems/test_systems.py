"""What each system asks of the scheduler or of DDP."""

import pytest

from bench import systems
from bench.systems import ON_COMMSCHED, ddp, ddp_tuned
from commsched.core.errors import ConfigError


def test_names_are_those_of_the_files():
    assert systems.names() == ["commsched", "ddp", "ddp-tuned", "fifo", "p3", "serial", "tictac", "wfbp"]
    assert set(systems.names()) > ON_COMMSCHED
    assert set(systems.names()) - ON_COMMSCHED == {"ddp", "ddp-tuned"}


@pytest.mark.parametrize("name", ["horovod", "context", "ddp_tuned", ""])
def test_what_is_not_there_is_said(name):
    with pytest.raises(ConfigError, match=f"systems: '{name}' is unknown; there are: commsched, ddp, ddp-tuned, fifo, p3"):
        systems.require(name)


def test_buckets_are_torchs_own_for_a_model_of_full_size():
    assert ddp.default_buckets(1.0) == ({}, "buckets 25 MiB (default)")


def test_buckets_shrink_like_the_bytes():
    assert ddp.default_buckets(0.5) == ({"bucket_cap_mb_list": [0.5, 12.5]}, "buckets 12.5 MiB (default, scaled)")


def test_an_older_torch_scales_all_buckets_alike_and_says_so(monkeypatch):
    monkeypatch.setattr(ddp, "_OPTIONS", {})
    assert ddp.default_buckets(0.5) == ({"bucket_cap_mb": 12.5}, "buckets 12.5 MiB (default, scaled), the first too")


def test_tuned_ddp_takes_the_fastest_of_its_trials(monkeypatch):
    seconds, built = {4: 3.0, 2: 1.0, 1: 2.0}, []
    monkeypatch.setattr(ddp_tuned, "_candidates", lambda context: [({"bucket_cap_mb": n}, f"buckets {n}") for n in seconds])
    monkeypatch.setattr(ddp_tuned, "_trial_seconds", lambda context, arguments, words: seconds[arguments["bucket_cap_mb"]])
    monkeypatch.setattr(ddp_tuned, "DdpSystem", lambda *arguments: built.append(arguments) or "system")
    assert ddp_tuned.make_system("context") == "system"
    assert built == [("context", {"bucket_cap_mb": 2}, "buckets 2; best of 3")]
