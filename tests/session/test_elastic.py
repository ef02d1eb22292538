"""What an elastic loop gives to a new process, besides the model. The loops themselves: ``tests/plugins``, ``tests/jobs``."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from commsched.control.elastic_messages import Listens, Place, RankEnded
from commsched.control.generations import Asked
from commsched.core.errors import CommschedError, ConfigError, PeerLost, PeerTimeout, UnsupportedError
from commsched.core.interfaces import OnFailure
from commsched.session import membership
from commsched.session.elastic import Elastic, Keep, _packed, _unpacked
from commsched.session.local import local_sessions
from commsched.session.membership import ElasticMember, require_can_be_elastic
from commsched.session.session import Session
from commsched.settings import Settings


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        {"samples": 7, "best": math.inf, "name": "a", "shares": [[1, 2], (3.5, None)]},
        {1: {2: ()}, (1, 2): [], None: {}},
        {"milestones": Counter({30: 1, 60: 2})},
        {"dict": 1, "list": 2},
    ],
    ids=str,
)
def test_state_is_the_same_after_its_journey(value: Any) -> None:
    there = _unpacked(json.loads(json.dumps(_packed(value, "it"))))
    assert there == value
    assert type(there) is type(value)


def test_other_values_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"the state of an Elastic\['seen'\] holds a set; it may hold numbers, text, None, and"
    ):
        _packed({"seen": [{1, 2}]}, "the state of an Elastic")


def test_a_rank_that_is_lost_while_a_generation_opens_ends_that_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Asked] = []
    opened = local_sessions(1)[0]

    def ask(member: ElasticMember, asked: Asked) -> Place:
        said.append(asked)
        return Place(len(said), 0, 2, 0, 2, 0, 5, "127.0.0.1", "generation 2")

    def open_session(*_: object) -> Session:
        if len(said) == 1:
            raise PeerTimeout("rank 1 of 2 did not join within 10 s")
        return opened

    monkeypatch.setattr(ElasticMember, "_ask", ask)
    monkeypatch.setattr(membership, "open_session", open_session)
    member = ElasticMember("/nowhere", Settings.load({"token": "a secret"}, {}), "cpu")
    assert member.move(Asked(5, lost=1, was_silent=True)) is opened
    assert said == [Asked(5, lost=1, was_silent=True), Asked(5)]
    assert opened.place is not None
    assert opened.place.generation == 2
    opened.close()


PLACE = Place(2, 1, 2, 0, 2, 0, 5, "127.0.0.1", "generation 2")


def member_of(monkeypatch: pytest.MonkeyPatch, open_session: Callable[..., Session]) -> ElasticMember:
    monkeypatch.setattr(ElasticMember, "_ask", lambda *_: PLACE)
    monkeypatch.setattr(membership, "open_session", open_session)
    return ElasticMember("/nowhere", Settings.load({"token": "a secret"}, {}), "cpu")


@pytest.mark.parametrize("is_known_before", [True, False])
def test_an_opening_is_broken_off_when_the_launcher_says_that_the_generation_has_lost_a_rank(
    monkeypatch: pytest.MonkeyPatch, is_known_before: bool
) -> None:
    lost: list[CommschedError] = []

    def open_session(_: object, __: object, ___: object, ____: object, when_lost: Callable[[OnFailure], object]) -> Session:
        when_lost(lost.append)
        for generation in () if is_known_before else (1, 3, 2):
            member._break_off(RankEnded(generation, "rank 0 (pid 7) has ended", 0))
        raise lost[0]

    member = member_of(monkeypatch, open_session)
    if is_known_before:
        member._break_off(RankEnded(2, "rank 0 (pid 7) has ended", 0))
    with pytest.raises(PeerLost, match=r"^rank 0 \(pid 7\) has ended$") as caught:
        member._open(PLACE)
    assert (len(lost), caught.value.rank) == (1, 0)
    member._break_off(RankEnded(2, "rank 0 (pid 7) has ended", 0))
    assert len(lost) == 1  # nothing is being opened


def test_who_waits_for_rank_0_to_listen_hears_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    member = member_of(monkeypatch, pytest.fail)
    for answer in (
        RankEnded(1, "rank 0 (pid 3) has ended", 0),
        Listens(1, "a:1"),
        RankEnded(2, "the server at b:7 serves it no more"),
    ):
        member._listens.put(answer)
    with pytest.raises(PeerLost, match=r"^the server at b:7 serves it no more$"):
        member._hear(2, 60.0)


def test_a_token_file_that_is_replaced_during_the_job_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("a secret")
    member = ElasticMember("/nowhere", Settings.load({"token_file": str(file)}, {}), "cpu")
    file.write_text("another one")
    place = Place(2, 0, 2, 0, 2, 0, 5, "127.0.0.1", "generation 2")
    opened = local_sessions(1)[0]
    given: list[tuple[str | None, str | None]] = []

    def open_session(_: object, settings: Settings, *__: object) -> Session:
        given.append((settings.token, settings.job))
        return opened

    monkeypatch.setattr(ElasticMember, "_ask", lambda *_: place)
    monkeypatch.setattr(membership, "open_session", open_session)
    assert member.move(Asked(5)) is opened
    assert given == [("a secret", "generation 2")]
    opened.close()


ORDINARY = SimpleNamespace(place=None, membership=None, failure=None, rank=1, world_size=2)


class NoPart:
    """An optimizer in a job that is not elastic."""

    elastic_part: Any = SimpleNamespace(session=ORDINARY, synchronize=lambda: None)


def test_what_is_kept_is_one_of_three() -> None:
    for keep in get_args(Keep):
        Elastic(NoPart(), keep=keep)
    with pytest.raises(ConfigError, match=r"""^keep='gpu' of Elastic: it may be "device", "cpu" or "nothing"$"""):
        Elastic(NoPart(), keep="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("also", "message"),
    [
        (Path(), "also= of Elastic is a PosixPath; it may be a list, such as also=.scheduler."),
        ("scheduler", "also= of Elastic is a str; it may be a list"),
        ([Path()], r"also= of Elastic holds a PosixPath, which has no state_dict\(\)"),
        ([SimpleNamespace(state_dict=dict)], r"also= of Elastic holds a SimpleNamespace, which has no load_state_dict\(\)"),
    ],
)
def test_what_else_has_a_state_is_a_list_of_objects_that_have_one(also: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Elastic(NoPart(), also=also)


def test_a_step_that_is_not_entered_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for step in Elastic(NoPart()).steps(4):
        if step.number == 0:
            with step:
                assert not caplog.messages
    [message] = caplog.messages
    assert message.startswith("rank 1: step 1 of Elastic.steps() was not entered: put what a step does into 'with step:'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "mpi"}, "transport='mpi' cannot be used with --elastic, which works over ps and gloo only"),
        ({"trace": "traces"}, "trace='.*traces' cannot be used with --elastic"),
        ({"tune": "1"}, "tune=.* cannot be used with --elastic"),
    ],
)
def test_settings_that_cannot_be_elastic(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_can_be_elastic(Settings.load(settings, {}))


def test_a_tuned_file_counts_in_the_first_generation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones may have other ranks and hosts, which the file is not for."""
    tuned: list[object] = []

    def opened(world: object, settings: Settings, *_: object) -> object:
        tuned.append(settings.tuned)
        return SimpleNamespace()

    monkeypatch.setattr(membership, "open_session", opened)
    member = ElasticMember("nowhere", Settings(token="t" * 32, tuned={"workers": 2}), "cpu")
    for generation in (1, 2):
        member._open(Place(generation, 0, 2, 0, 2, 0, 0, "127.0.0.1", "job"))
    assert tuned == [{"workers": 2}, None]
