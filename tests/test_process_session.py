"""What ``commsched.init`` opens, once for a process, and what it takes its launcher's word for."""

from __future__ import annotations

import os

import pytest

import commsched
from commsched.core.errors import ConfigError


def test_a_process_without_launcher_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    session = commsched.init(partition="1MB")
    try:
        assert (session.rank, session.world_size) == (0, 1)
        assert session.core.config.partition_bytes == 1_000_000
        assert commsched.init() is session
        with pytest.raises(commsched.ConfigError, match="already initialised; give credit at the first call of init"):
            commsched.init(credit="1MB")
    finally:
        commsched.shutdown()
    commsched.shutdown()
    with pytest.raises(commsched.ConfigError, match="partiton is not a setting; did you mean partition"):
        commsched.init(partiton="1MB")


def test_a_library_that_counts_other_ranks_than_the_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    commsched.require_world_size(3, "its own launcher")
    launched = {"COMMSCHED_RANK": "0", "COMMSCHED_WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", launched)
    commsched.require_world_size(2, "Trainer(devices=2)")
    with pytest.raises(ConfigError, match=r"commsched run started 2 ranks, but Trainer\(devices=1\) makes 1; let them agree"):
        commsched.require_world_size(1, "Trainer(devices=1)")
