import math
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ConfigError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.settings import Settings
from commsched.tuner.result import (
    JobKey,
    ModelCheck,
    Verdict,
    _toml,
    check_tuned,
    describe_transport,
    why_not,
    write_tuned,
)

MODEL = Manifest((TensorSpec("weight", (1000, 100), "float32"), TensorSpec("bias", (100,), "float32")))
FLAGS = Manifest((TensorSpec("flags", (2,), "float32"),))
OTHER = Manifest((TensorSpec("weight", (10, 10), "float32"),))
KEY = JobKey(MODEL.model_fingerprint, 4, 2, "ps over tcp", "eth0, 10000 Mb/s")
KEPT = SchedulerConfig(2_000_000, 8_000_000, "fifo")
VERDICT = Verdict("kept", KEPT, SchedulerConfig(), KEPT, 12, 11, 300, 61.0, 0.18, 0.17, 0.19, 6, 0.412, 0.337)


def write(path: Path, verdict: Verdict = VERDICT, key: JobKey = KEY) -> Path:
    write_tuned(path, verdict, key, MODEL, groups=(FLAGS,), version="0.1.0")
    return path


def load(path: Path, **environ: str) -> Settings:
    return Settings.load({}, {"COMMSCHED_CONFIG": str(path), **environ})


def tuned(path: Path) -> dict[str, Any]:
    table = load(path).tuned
    assert table is not None
    return dict(table)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.toml"


@pytest.mark.parametrize("kept", [KEPT, replace(KEPT, fusion_bytes=500_000)])
def test_settings_load_what_was_kept(path: Path, kept: SchedulerConfig) -> None:
    settings = load(write(path, replace(VERDICT, kept=kept)))
    assert settings.scheduler == kept
    assert settings.given == frozenset()  # a place to begin, not a wish


def test_a_user_s_own_setting_comes_before_it(path: Path) -> None:
    settings = load(write(path), COMMSCHED_PARTITION="1MB")
    assert settings.scheduler == replace(KEPT, partition_bytes=1_000_000)
    assert settings.given == {"partition"}


def test_it_says_what_it_is_for_and_what_it_gained(path: Path) -> None:
    table = tomllib.loads(write(path).read_text())["tuned"]
    assert table == {
        "model": MODEL.model_fingerprint,
        "world_size": 4,
        "hosts": 2,
        "transport": "ps over tcp",
        "link": "eth0, 10000 Mb/s",
        "groups": sorted([MODEL.model_fingerprint, FLAGS.model_fingerprint]),
        "tensors": 2,
        "bytes": 400_400,
        "version": "0.1.0",
        "reason": "kept",
        "step_seconds_before": 0.412,
        "step_seconds_after": 0.337,
        "gain": 0.18,
        "low": 0.17,
        "high": 0.19,
    }
    assert f"# {VERDICT.sentence()}\n" in path.read_text()


@pytest.mark.parametrize("reason", ["no gain", "not confirmed"])
def test_without_a_gain_it_holds_what_was_set(path: Path, reason: Any) -> None:
    settings = load(write(path, replace(VERDICT, reason=reason, kept=SchedulerConfig())))
    assert settings.scheduler == SchedulerConfig()
    assert settings.tuned is not None
    assert [settings.tuned[name] for name in ("gain", "low", "high")] == [0, 0, 0]
    assert settings.tuned["step_seconds_after"] == settings.tuned["step_seconds_before"] == 0.412


@pytest.mark.parametrize("verdict", [replace(VERDICT, reason="failed"), replace(VERDICT, reason="unfinished")])
def test_what_is_no_result_is_not_written(path: Path, verdict: Verdict) -> None:
    with pytest.raises(ValueError, match=f"a verdict '{verdict.reason}' is no result"):
        write(path, verdict)
    assert not path.exists()


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(path: Path) -> None:
    path.write_text("old")
    with path.open() as reader:
        write(path)
        assert reader.read() == "old"
    assert tuned(path)["world_size"] == 4
    assert [entry.name for entry in path.parent.iterdir()] == ["tuned.toml"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def test_where_it_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tuned file '.*nowhere/t.toml' cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "t.toml")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory"):
        write(tmp_path / "taken")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


@given(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.lists(st.text('a"\\\n\x7f\t'))
    )
)
def test_toml_reads_what_was_written(value: object) -> None:
    assert tomllib.loads(f"value = {_toml(value)}")["value"] == value


@given(st.floats(allow_nan=False))
def test_toml_reads_the_same_number(value: float) -> None:
    found = tomllib.loads(f"value = {_toml(value)}")["value"]
    assert found == value
    assert math.copysign(1, found) == math.copysign(1, value)


# --- what it fits ---


def test_it_fits_the_job_that_it_was_made_for(path: Path) -> None:
    table = tuned(write(path))
    check_tuned(table, 4, 2, "ps over tcp", "eth0, 10000 Mb/s")
    check = ModelCheck(table, warn=True)
    check.on_register(0, FLAGS)
    check.on_register(1, MODEL)
    ModelCheck(table, warn=True).on_register(0, Manifest(MODEL.tensors[::-1]))  # a forward that is not always the same
    assert why_not(KEY, KEY) is None


@pytest.mark.parametrize(
    ("world_size", "hosts", "transport", "link", "why"),
    [
        (2, 2, "ps over tcp", "eth0, 10000 Mb/s", "is for 4 ranks, but this job has 2;"),
        (4, 1, "ps over tcp", "eth0, 10000 Mb/s", "is for 2 hosts, but this job has 1;"),
        (4, 2, "gloo", "eth0, 10000 Mb/s", "is for transport ps over tcp, but this job uses gloo;"),
        (4, 2, "ps over tcp", "loopback", "is for the link 'eth0, 10000 Mb/s', but this job has 'loopback';"),
    ],
)
def test_another_job_is_refused_by_what_differs(
    path: Path, world_size: int, hosts: int, transport: str, link: str, why: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_tuned(tuned(write(path)), world_size, hosts, transport, link)
    assert str(raised.value) == f"the tuned file {why} tune again for this job, or unset COMMSCHED_CONFIG"


def test_another_model_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelCheck(tuned(write(path)), warn=False).on_register(0, OTHER)
    assert str(raised.value) == (
        "the tuned file is for another model, but this job trains one with other tensors (1 tensors, 400 bytes, instead of 2 "
        "tensors, 400400 bytes); tune again for this job, or unset COMMSCHED_CONFIG"
    )


def test_another_model_after_one_that_fits_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job of stages is not to be ended in the middle by what its first stage was tuned for."""
    checks = [ModelCheck(tuned(write(path)), warn=warn) for warn in (True, False)]
    for check in checks:
        for group, manifest in enumerate((MODEL, OTHER, OTHER, FLAGS)):
            check.on_register(group, manifest)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "a group of tensors (1 tensors, 400 bytes) was not there when the tuned file was made; it is used all the same",
        )
    ]


@pytest.mark.parametrize("missing", ["hosts", "model", "world_size", "transport", "link"])
@pytest.mark.parametrize("value", [None, 4.5, True])
def test_an_incomplete_table_is_refused(path: Path, missing: str, value: object) -> None:
    table = {**tuned(write(path)), missing: value}
    with pytest.raises(ConfigError, match=rf"the tuned file is not complete: {missing}={value} in its table \[tuned\]"):
        check_tuned(table, 4, 2, "ps over tcp", "eth0, 10000 Mb/s")


def test_a_table_without_groups_is_refused(path: Path) -> None:
    table = tuned(write(path))
    del table["groups"]
    with pytest.raises(ConfigError, match="no list groups"):
        ModelCheck(table, warn=False)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("ps", Settings(), "ps over tcp"),
        ("ps", Settings(lane="grpc", servers=("a:1", "b:2"), wire="bfloat16"), "ps over grpc, 2 servers, wire=bfloat16"),
        ("gloo", Settings(order="static", hierarchy="off"), "gloo, order=static, hierarchy=off"),
        ("gloo", Settings(order="agreed"), "gloo"),
        ("ps", Settings(flows=2), "ps over tcp, flows=2"),
        ("ps", Settings(security="tls"), "ps over tcp, security=tls"),
        ("mpi", Settings(), "mpi"),
        ("mpi", Settings(collective="rsag"), "mpi, collective=rsag"),
    ],
)
def test_a_transport_in_words(name: str, settings: Settings, words: str) -> None:
    assert describe_transport(name, settings) == words
