"""Finding a transport by name, and the settings that it uses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import commsched.transports as transports
from commsched.core.errors import ConfigError
from commsched.core.interfaces import Transport
from commsched.settings import Settings
from commsched.testing.checked_world import Meeting
from commsched.transports import load_backend, require_transport, transport_names, users_of, without_effect
from commsched.transports.backend import Backend, TransportContext
from commsched.transports.open import open_named
from commsched.transports.wire import WireTransport
from tests.recording_transport import RecordingTransport


def test_lists_transports_and_not_what_they_share():
    assert {"gloo", "local", "mpi", "nccl", "ps"} <= set(transport_names())
    assert all(callable(load_backend(name).open) for name in transport_names())


def test_a_known_name_is_accepted():
    assert require_transport("ps") == "ps"


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"transport='tcpx' is unknown; there are: auto, gloo, mpi, nccl, ps$"):
        require_transport("tcpx")


def test_one_for_tests_is_accepted_and_not_named():
    assert require_transport("local") == "local"
    with pytest.raises(ConfigError, match=r"transport='locl' is unknown; there are: auto, gloo, mpi, nccl, ps$"):
        require_transport("locl")


@pytest.mark.parametrize(
    ("keywords", "transport", "said"),
    [
        ({"rate": "1gbit"}, "gloo", ["rate=1gbit has no effect with transport=gloo: it is for ps"]),
        ({"lane": "grpc", "servers": "a:1"}, "mpi", ["servers=", "lane='grpc' has no effect with transport=mpi: it is for ps"]),
        ({"lane": "tcp", "order": "auto"}, "gloo", []),  # the defaults
        ({"rate": "1gbit", "lane": "grpc"}, "ps", []),
        ({"collective": "rsag"}, "nccl", []),
        ({"order": "static"}, "nccl", ["order='static' has no effect with transport=nccl: it is for gloo, "]),
        ({"collective": "rsag"}, "ps", ["collective='rsag' has no effect with transport=ps: it is for gloo, mpi, "]),
        ({"flows": "2"}, "gloo", ["flows=2 has no effect with transport=gloo: it is for ps"]),
        ({"flows": "2"}, "ps", []),
        ({"host": "a+b"}, "gloo", ["host='a+b' is several addresses, and transport=gloo uses one: several are for ps"]),
        ({"host": "a+b"}, "ps", []),
        ({"host": "a"}, "gloo", []),
        ({"security": "tls"}, "mpi", ["transport=mpi cannot encrypt, so security='tls' is refused: take transport=ps, or a "]),
        ({"security": "tls"}, "ps", []),
        ({"wire": "float16"}, "nccl", ["wire='float16' has no effect with transport=nccl: it is for gloo, "]),
        ({"hierarchy": "on"}, "nccl", ["hierarchy='on' has no effect with transport=nccl: it is for gloo, "]),
    ],
)
def test_settings_without_effect_are_named(keywords: dict[str, str], transport: str, said: list[str]) -> None:
    problems = without_effect(Settings.load(keywords, {}), transport)
    assert [name for name in problems if name not in keywords] == []
    assert len(problems) == len(said)
    assert all(problem.startswith(begin) for problem, begin in zip(problems.values(), said))


def test_a_transport_names_only_settings_that_are_for_some_transports() -> None:
    used = [load_backend(name).settings for name in transport_names()]
    assert frozenset.union(*used) == set(Settings.names("some_transports"))


# --- a transport that nothing but its module knows ---


class Acme:
    """A made-up library's transport, found as ``backends/acme`` would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
        self.happened: list[str] = []
        backend = Backend(self._open, frozenset(settings), lambda context: self.happened.append("prepared"))
        load = transports.import_module
        monkeypatch.setattr(
            transports,
            "import_module",
            lambda name: SimpleNamespace(BACKEND=backend) if name.endswith(".acme") else load(name),
        )
        names = [*transport_names(), "acme"]
        monkeypatch.setattr(transports, "transport_names", lambda: names)

    def _open(self, context: TransportContext) -> Transport:
        self.happened.append("opened")
        return RecordingTransport(context.world.rank, context.world.world_size)


def a_context(**settings: Any) -> TransportContext:
    return Meeting(1).context(0, pytest.fail, **settings)


def test_a_new_transport_is_prepared_and_opened_and_uses_the_settings_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    others = users_of("order")
    acme = Acme(monkeypatch, "wire", "hierarchy", "order")
    assert isinstance(open_named(a_context(wire="float16", hierarchy="off"), "acme"), WireTransport)
    assert acme.happened == ["prepared", "opened"]
    settings = Settings.load({"order": "static", "lane": "grpc"}, {})
    assert without_effect(settings, "acme") == {"lane": "lane='grpc' has no effect with transport=acme: it is for ps"}
    assert without_effect(settings, "ps") == {
        "order": f"order='static' has no effect with transport=ps: it is for {', '.join(others)}, acme"
    }


def test_a_transport_that_does_not_name_the_hierarchy_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    acme = Acme(monkeypatch)
    context = replace(a_context(hierarchy="on"), gather=pytest.fail)
    assert isinstance(open_named(context, "acme"), RecordingTransport)
    assert acme.happened == ["prepared", "opened"]
