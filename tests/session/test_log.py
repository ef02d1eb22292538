"""What the user sees, with and without logging set up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.core.world import World, detect_world
from commsched.session.log import FirstLine, alone_line, first_line, log, no_rank_line, say, say_whose_warnings, set_level
from commsched.settings import Settings


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


# --- the line that every job begins with ---

MANIFEST = Manifest(tuple(TensorSpec(f"layer{i}", (1000, 500), "float32") for i in range(3)))
ONE = Manifest((TensorSpec("weight", (20,), "float64"),))


@pytest.mark.parametrize(
    ("settings", "transport", "ordered", "manifest", "line"),
    [
        (
            {},
            "ps",
            False,
            MANIFEST,
            "ps over tcp, 3 tensors of 6.0 MB per step, partition 4.0 MB at first, credit 16.0 MB at first, priority",
        ),
        (
            {"flows": 3, "partition": 64_000, "credit": 16_000_000},
            "ps",
            False,
            ONE,
            "ps over tcp on 3 flows, 1 tensor of 160 bytes per step, partition 64 KB, credit 16.0 MB, priority",
        ),
        (
            {"lane": "grpc", "servers": ("a:1",), "wire": "bfloat16", "credit": 16_000_000, "security": "tls"},
            "ps",
            False,
            MANIFEST,
            "ps over grpc with 1 server, 3 tensors of 6.0 MB per step, partition 4.0 MB at first, credit 16.0 MB, priority, "
            "bfloat16 on the wire, encrypted",
        ),
        (
            {"order": "static", "collective": "rsag", "partition": 64_000, "credit": 16_000_000},
            "gloo",
            True,
            ONE,
            "gloo, 1 tensor of 160 bytes per step, partition 64 KB, credit 16.0 MB, priority, rsag, static order",
        ),
    ],
)
def test_it_says_what_decides_on_speed_and_result(
    settings: dict[str, Any], transport: str, ordered: bool, manifest: Manifest, line: str
) -> None:
    given = replace(Settings(), **settings)
    assert first_line(given, transport, ordered, 4, 2, given.scheduler, manifest) == f"4 ranks on 2 hosts, {line}"


def test_the_configuration_is_that_in_use() -> None:
    """Which a tuner may have changed, or may be that of a tuned file."""
    settings = Settings(partition=4_000_000, credit=16_000_000)
    line = first_line(settings, "ps", False, 2, 1, SchedulerConfig(partition_bytes=1_500_000, policy="fifo"), ONE)
    assert line.startswith("2 ranks on 1 host, ps over tcp, ")
    assert line.endswith(", partition 1.5 MB, credit 16.0 MB, fifo")


@pytest.mark.parametrize(
    ("settings", "may_freeze", "manifest", "order"),
    [
        ({}, True, MANIFEST, "agreed order at first"),
        ({}, False, MANIFEST, "agreed order"),  # as over nccl
        ({}, True, ONE, "agreed order"),  # too small to say anything
        ({"tune": "1"}, True, MANIFEST, "agreed order"),
        ({"order": "agreed"}, True, MANIFEST, "agreed order"),
        ({"order": "static"}, True, MANIFEST, "static order"),
    ],
)
def test_it_says_whether_the_order_is_open(settings: dict[str, Any], may_freeze: bool, manifest: Manifest, order: str) -> None:
    given = Settings.load(settings, {})
    line = first_line(given, "gloo", True, 4, 2, given.scheduler, manifest, may_become_static=may_freeze)
    assert line.endswith(f"priority, {order}")


def test_it_says_whether_each_host_sums_first() -> None:
    line = first_line(Settings(), "ps", False, 4, 2, SchedulerConfig(), ONE, one_per_host=True)
    assert line.endswith(", priority, each host sums first (hierarchy)")


def test_it_is_said_once() -> None:
    said: list[str] = []
    first = FirstLine(said.append, lambda manifest: [f"{len(manifest.tensors)} tensors", "and more"])
    first.on_register(1, MANIFEST)
    first.on_register(2, ONE)
    assert said == ["3 tensors", "and more"]


@pytest.mark.parametrize(
    ("environ", "more"),
    [
        ({}, ""),
        ({"PMI_SIZE": "1"}, ""),
        ({"PMI_SIZE": "2"}, " (PMI_SIZE=2, but no launcher that commsched knows gave this process a rank)"),
        ({"SLURM_NTASKS": "8"}, " (SLURM_NTASKS=8, but no launcher that commsched knows gave this process a rank)"),
    ],
)
def test_a_process_that_is_alone_says_that_nothing_is_averaged(environ: dict[str, str], more: str) -> None:
    line = "1 process, so nothing is averaged; start more with commsched run -n N -- COMMAND, torchrun, mpirun or srun"
    assert alone_line(environ) == line + more


def test_a_launcher_that_does_not_set_what_scripts_share_their_data_by_is_named() -> None:
    mpi = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    line = no_rank_line(detect_world(mpi), mpi)
    assert line is not None
    assert line.startswith(
        "mpiexec (MPICH) sets no RANK and WORLD_SIZE: a script that shares out its data by them reads the same"
    )
    assert no_rank_line(detect_world(mpi), {**mpi, "RANK": "0"}) is None
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert no_rank_line(detect_world(torchrun), torchrun) is None
    assert no_rank_line(World(0, 2, 0, 2, "Lightning"), {}) is None
