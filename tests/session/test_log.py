"""What the user sees, with and without logging set up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest

from commsched.session.log import log, say, say_whose_warnings, set_level


@contextmanager
def bare_logging() -> Iterator[None]:
    """Logging as a script finds it, without the handlers that pytest adds when a test begins."""
    root = logging.getLogger()
    before = [(logger, logger.handlers, logger.level) for logger in (root, log)]
    root.handlers, log.handlers = [], []
    root.setLevel(logging.WARNING)
    log.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)


def everything(to: logging.Logger) -> StringIO:
    """A handler of the script's own."""
    text = StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("SCRIPT %(levelname)s %(message)s"))
    to.addHandler(handler)
    return text


@bare_logging()
def test_without_logging_a_line_is_seen_and_records_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    say("2 ranks")
    log.info("not asked for")
    log.warning("beware")
    assert capsys.readouterr().err == "commsched: 2 ranks\nbeware\n"


@bare_logging()
def test_once_a_session_has_opened_a_warning_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say_whose_warnings()
    say_whose_warnings()
    say("2 ranks")
    log.info("not asked for")
    log.warning("beware")
    assert capsys.readouterr().err == "commsched: 2 ranks\ncommsched: beware\n"
    text = everything(log)
    log.warning("beware")
    assert (text.getvalue(), capsys.readouterr().err) == ("SCRIPT WARNING beware\n", "")


@pytest.mark.parametrize(("level", "seen"), [("INFO", "SCRIPT INFO 2 ranks\n"), ("WARNING", "")])
@pytest.mark.parametrize("name", [None, "commsched"])
@bare_logging()
def test_a_script_that_set_up_logging_decides(
    capsys: pytest.CaptureFixture[str], level: str, seen: str, name: str | None
) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(level)
    text = everything(logger)
    say("2 ranks")
    assert (text.getvalue(), capsys.readouterr().err) == (seen, "")


@bare_logging()
def test_a_level_or_a_disabled_logging_is_a_decision_too(capsys: pytest.CaptureFixture[str]) -> None:
    log.setLevel("ERROR")
    say("2 ranks")
    log.setLevel(logging.NOTSET)
    logging.disable(logging.INFO)
    say("2 ranks")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("warning", "commsched: beware\n"),
        ("info", "commsched: 2 ranks\ncommsched: asked for\ncommsched: beware\n"),
        ("debug", "commsched: 2 ranks\ncommsched: in detail\ncommsched: asked for\ncommsched: beware\n"),
    ],
)
@bare_logging()
def test_one_may_ask_for_less_or_more(capsys: pytest.CaptureFixture[str], level: str, seen: str) -> None:
    set_level(level)
    set_level(level)
    say("2 ranks")
    log.debug("in detail")
    log.info("asked for")
    log.warning("beware")
    assert capsys.readouterr().err == seen


@bare_logging()
def test_what_is_asked_for_goes_where_the_script_wants_it_even_if_it_says_so_later(capsys: pytest.CaptureFixture[str]) -> None:
    set_level("info")
    log.info("early")
    text = everything(logging.getLogger())
    log.info("late")
    assert (text.getvalue(), capsys.readouterr().err) == ("SCRIPT INFO late\n", "commsched: early\n")
