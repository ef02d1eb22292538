"""The layers and times of a rank that is alone, for ``commsched predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commsched.core.group import TensorGroup
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.world import World
from commsched.session.local import local_sessions
from commsched.session.opening import open_session
from commsched.session.recording import STEPS_TO_RECORD, ForwardMarks, start_recording
from commsched.session.session import Session
from commsched.settings import Settings
from commsched.simulator.profile import Profile
from commsched.transports.open import detect_capabilities
from commsched.tuner.meter import StepTimer
from commsched.tuner.profiler import Profiler

MANIFEST = Manifest(tuple(TensorSpec(name, (8,), "float32") for name in ("embed.weight", "head.weight", "head.bias")))


def step(group: TensorGroup) -> None:
    group.begin_step()
    for tensor in reversed(range(len(MANIFEST.tensors))):
        group.notify_ready(tensor)
    for proxy in group.proxies:
        proxy.wait()


def registered(session: Session) -> TensorGroup:
    return session.register(MANIFEST, {"float32": memoryview(bytearray(MANIFEST.nbytes))})


def test_the_layers_are_written_when_enough_steps_are_over(tmp_path: Path) -> None:
    found = record_of(tmp_path / "record.json")
    names = [layer["name"] for layer in found["profile"]["layers"]]
    assert names == ["before forward", *(spec.name for spec in MANIFEST.tensors)]
    assert Profile.from_record(found["profile"]).nbytes == MANIFEST.nbytes
    assert (found["measures_norms"], found["full_wait"]) == (False, None)
    assert found["gloo"] == detect_capabilities().gloo


def record_of(path: Path) -> Any:
    """Train a group until ``path`` is written, and return its content."""
    [session] = local_sessions(1)
    start_recording(session, path)
    assert session.is_recorded
    group = registered(session)
    for _ in range(100_000):  # the thread that records may begin to count later than this one makes steps
        if path.exists():
            break
        step(group)
    session.close()
    return json.loads(path.read_text())


def test_why_nothing_can_be_learned_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ``commsched predict`` would wait until training ends."""
    monkeypatch.setattr(Profiler, "layers", lambda self, manifest: None)
    assert record_of(tmp_path / "none") == {"error": "20 steps were observed, none of them complete"}
    monkeypatch.setattr(Profiler, "layers", lambda self, manifest: {}["embed"])
    assert record_of(tmp_path / "fails") == {"error": "KeyError: 'embed'"}


def test_when_another_group_is_trained_its_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, ends = StepTimer.wait_for_steps, [False]
    monkeypatch.setattr(StepTimer, "wait_for_steps", lambda *how: wait(*how) and (ends.pop() if ends else True))
    assert "profile" in record_of(tmp_path / "record.json")
    assert ends == []


def test_a_training_that_ends_before_leaves_no_file(tmp_path: Path) -> None:
    [session] = local_sessions(1)
    start_recording(session, tmp_path / "record.json")
    group = registered(session)
    for _ in range(3):
        step(group)
    session.close()
    assert STEPS_TO_RECORD > 3
    assert list(tmp_path.iterdir()) == []


def test_only_a_rank_that_is_alone_and_not_disabled_is_recorded(tmp_path: Path) -> None:
    for settings, recorded in ((Settings(record=str(tmp_path / "r")), True), (Settings(), False)):
        with open_session(World(0, 1), settings) as session:
            assert session.is_recorded == recorded
    with open_session(World(0, 2), Settings(record=str(tmp_path / "r"), disable=True)) as session:
        assert not session.is_recorded


def test_forward_times_are_those_between_the_beginnings_of_modules() -> None:
    """A step of 10 s: backward until 4 s, data until 5 s, then 1 s of the embedding and 4 s of the head."""
    profiler, marks = Profiler(7, steps=2), ForwardMarks()
    marks.on_span("forward", "embed", 0.0, 0.5)  # before it follows a group
    marks.follow(7, MANIFEST, profiler)
    for number in range(3):
        at = 10.0 * number
        for observer in (profiler, marks):
            observer.on_step(7, number, at)
        marks.on_span("forward", "embed", at + 0.5, at + 0.6)  # computed again within backward
        for tensor, ready in ((2, 0.0), (1, 2.0), (0, 4.0)):
            for observer in (profiler, marks):
                observer.on_ready(7, tensor, at + ready)
        marks.on_span("forward", "embed", at + 5.0, at + 6.0)
        marks.on_span("forward", "between", at + 6.0, at + 6.0)  # has no parameters
        marks.on_span("forward", "head", at + 6.0, at + 10.0)
    profile = profiler.layers(MANIFEST)
    assert profile is not None
    forward = {layer.name: layer.forward_seconds for layer in profile.layers}
    assert forward["before forward"] == pytest.approx(1.0)
    assert forward["embed.weight"] == pytest.approx(1.0)
    assert forward["head.weight"] + forward["head.bias"] == pytest.approx(4.0)
    assert profile.compute_seconds == pytest.approx(10.0)


def test_without_a_complete_step_there_are_no_layers() -> None:
    assert Profiler(7).layers(MANIFEST) is None
