import pytest

from bench import systems
from bench.harness.system import Carrier
from bench.systems import SystemSpec, carrier_of_job, parse
from commsched.core.errors import ConfigError


def test_a_name_by_itself_travels_as_the_job_does():
    assert parse("ddp-tuned") == SystemSpec("ddp-tuned", "ddp-tuned")
    assert parse("fifo") == SystemSpec("fifo", "fifo", None)


@pytest.mark.parametrize(
    ("text", "base", "carrier"),
    [
        ("commsched:ps", "commsched", Carrier("ps")),
        ("fifo:gloo", "fifo", Carrier("gloo")),
        ("commsched:gloo+rsag", "commsched", Carrier("gloo", "auto", "rsag")),
        ("commsched:gloo+static", "commsched", Carrier("gloo", "static")),
        ("commsched:gloo+agreed", "commsched", Carrier("gloo", "agreed")),
        ("fifo:gloo+rsag", "fifo", Carrier("gloo", "auto", "rsag")),
        ("p3:gloo+static+rsag", "p3", Carrier("gloo", "static", "rsag")),
    ],
)
def test_what_follows_the_name(text, base, carrier):
    assert parse(text) == SystemSpec(text, base, carrier)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pigeon:ps", "systems: 'pigeon' is unknown; there are: commsched, "),
        ("commsched:pigeon", "transport='pigeon' is unknown"),
        ("commsched:", "transport='' is unknown"),
        ("ddp:gloo", "systems: 'ddp:gloo': ddp does not run on a transport of commsched"),
        (
            "commsched:gloo+fast",
            r"'commsched:gloo\+fast': after the transport come \+rsag, and \+static or \+agreed, each once at most",
        ),
        ("commsched:gloo+rsag+rsag", r"after the transport come \+rsag, and \+static or \+agreed, each once at most"),
        ("commsched:gloo+static+agreed", r"after the transport come \+rsag, and \+static or \+agreed, each once at most"),
        ("commsched:ps+rsag", r"systems: 'commsched:ps\+rsag': ps has no rsag, which is for collectives"),
        ("commsched:ps+static", "ps has no static, which is for collectives"),
    ],
)
def test_what_cannot_be_had_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_transport_takes_what_its_backend_names(monkeypatch):
    monkeypatch.setattr(systems, "users_of", lambda setting: {"order": ["ps"], "rate": ["gloo"]}.get(setting, []))
    assert parse("commsched:ps+static").carrier == Carrier("ps", "static")
    with pytest.raises(ConfigError, match="gloo has no rsag, which is for collectives"):
        parse("commsched:gloo+rsag")
    assert parse("commsched:gloo").caps_itself("ps")
    assert not parse("commsched:ps").caps_itself("gloo")


def test_the_session_of_the_job_is_not_one_that_nobody_uses():
    assert carrier_of_job([parse("ddp"), parse("commsched:gloo")], "ps") == Carrier("ps")
    assert carrier_of_job([parse("commsched:gloo+static"), parse("commsched:ps")], "ps") == Carrier("gloo", "static")


def test_only_a_parameter_server_caps_itself():
    assert parse("fifo").caps_itself("ps")
    assert parse("commsched:ps").caps_itself("gloo")
    assert not parse("fifo").caps_itself("gloo")
    assert not parse("commsched:gloo").caps_itself("ps")
    assert not parse("ddp").caps_itself("ps")
