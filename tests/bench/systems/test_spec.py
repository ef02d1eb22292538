import pytest

from bench.harness.system import Way
from bench.systems import SystemSpec, parse, way_of_job
from commsched.core.errors import ConfigError


def test_a_name_by_itself_travels_as_the_job_does():
    assert parse("ddp-tuned") == SystemSpec("ddp-tuned", "ddp-tuned")
    assert parse("fifo") == SystemSpec("fifo", "fifo", None, "all_reduce")


@pytest.mark.parametrize(
    ("text", "base", "way", "collective"),
    [
        ("commsched:ps", "commsched", Way("ps"), "all_reduce"),
        ("fifo:gloo", "fifo", Way("gloo"), "all_reduce"),
        ("commsched:gloo+rsag", "commsched", Way("gloo"), "rsag"),
        ("commsched:gloo+static", "commsched", Way("gloo", "static"), "all_reduce"),
        ("fifo:gloo+rsag", "fifo", Way("gloo"), "rsag"),
        ("p3:gloo+static+rsag", "p3", Way("gloo", "static"), "rsag"),
    ],
)
def test_what_follows_the_name(text, base, way, collective):
    assert parse(text) == SystemSpec(text, base, way, collective)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pigeon:ps", "systems: 'pigeon' is unknown; there are: commsched, "),
        ("commsched:pigeon", "transport='pigeon' is unknown"),
        ("commsched:", "transport='' is unknown"),
        ("ddp:gloo", "systems: 'ddp:gloo': ddp does not run on a transport of commsched"),
        ("commsched:gloo+fast", r"'commsched:gloo\+fast': after the transport come \+rsag and \+static, each once at most"),
        ("commsched:gloo+rsag+rsag", r"after the transport come \+rsag and \+static, each once at most"),
        ("commsched:ps+rsag", r"systems: 'commsched:ps\+rsag': ps has no rsag, which is for collectives"),
        ("commsched:ps+static", "ps has no static, which is for collectives"),
    ],
)
def test_what_cannot_be_had_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_the_session_of_the_job_is_not_one_that_nobody_uses():
    assert way_of_job([parse("ddp"), parse("commsched:gloo")], "ps") == Way("ps")
    assert way_of_job([parse("commsched:gloo+static"), parse("commsched:ps")], "ps") == Way("gloo", "static")


def test_only_a_parameter_server_caps_itself():
    assert parse("fifo").caps_itself("ps")
    assert parse("commsched:ps").caps_itself("gloo")
    assert not parse("fifo").caps_itself("gloo")
    assert not parse("commsched:gloo").caps_itself("ps")
    assert not parse("ddp").caps_itself("ps")
