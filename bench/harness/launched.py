"""A job whose ranks a launcher has started (torchrun, mpiexec, srun): this process is one of them, wherever the others are."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import commsched
from commsched import CommschedError, ConfigError
from commsched.control.rendezvous import reached_at
from commsched.core import timeouts
from commsched.core.comparison import require_same
from commsched.core.world import World, detect_world
from commsched.session.process_end import is_consequence, let_the_cause_end_first, record
from commsched.settings import Settings
from commsched.transports.collective.failures import exit_if_job_fails
from commsched.tuner.link import describe_link

from .job import Outcome
from .network import own_address
from .rank import end


def launched(on_real_links: bool) -> World | None:
    """The world of this process, if a launcher has started it as one of several ranks; otherwise None.

    Raises:
        ConfigError: the launcher's variables contradict each other; or there is no launcher, but ``on_real_links``, and the
            settings are those of a job on several machines.
    """
    world = detect_world(os.environ)
    if world.world_size > 1:
        return world
    if on_real_links and world.launcher == "none" and Settings.load({}, os.environ).control is not None:
        raise ConfigError(
            "COMMSCHED_CONTROL is set, but no launcher has said which rank this is, of how many: start every rank by torchrun, "
            "mpiexec or srun; without COMMSCHED_CONTROL the benchmark starts its own ranks on this machine"
        )
    return None


def run_here(
    world: World,
    settings: Mapping[str, str],
    same: Mapping[str, Any],
    module: str,
    arguments: Mapping[str, Any],
    timeout_seconds: float,
) -> Outcome | None:
    """Call ``module.rank_main(session, arguments)`` in this process, which is a rank of a job that a launcher has started. The
    counterpart of ``job.run_job``. Collective.

    Returns the outcome on rank 0 and None on other ranks. The result of another rank than 0 holds ``systems`` only, without
    timelines.

    Args:
        settings: settings of the job, besides those of the environment.
        same: what must be equal on all ranks.

    Raises:
        CommschedError: the job failed; or ``same`` differs, and the message says where.
    """
    os.environ.update({f"COMMSCHED_{name.upper()}": value for name, value in settings.items()})
    # Otherwise the ranks of a machine would share its cores thread against thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world.local_world_size)))
    with commsched.init() as session, _time_limit(session, timeout_seconds):
        require_same(
            session.gather({"the version of commsched": commsched.__version__, **same}, "arguments"),
            lambda first: f"{first.key} is {first.text()}; start all ranks with the same arguments",
            ConfigError,
        )
        try:
            with exit_if_job_fails(session.when_failed):  # an engine's own collectives may wait for a lost rank for ever
                found = import_module(module).rank_main(session, arguments)
                systems = {name: {**each, "timeline": []} for name, each in found["systems"].items()}
                by_rank = [{"systems": each} for each in session.gather(systems)]
        except CommschedError:
            raise
        except Exception as error:
            raise session.await_failure(timeouts.RAISE_SECONDS) or error from error
        host = own_address()
        machines = len(set(session.gather(reached_at(host).machine)))
    if session.rank != 0:
        return None
    link = "loopback" if machines == 1 else f"of {machines} machines, {describe_link(host)}"
    return Outcome([found, *by_rank[1:]], link)


@contextmanager
def _time_limit(session: commsched.Session, seconds: float) -> Iterator[None]:
    def stop() -> None:
        why = f"the benchmark took longer than its time limit of {seconds:g} s (--timeout)"
        print(f"rank {session.rank}: {why}", file=sys.stderr, flush=True)
        session.abort(why)
        os._exit(1)

    timer = threading.Timer(seconds, stop)
    timer.name, timer.daemon = "commsched-bench-limit", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_with(run: Callable[[], int], program: str, world: World) -> NoReturn:
    """End this process, a rank, with the code that ``run`` returns, or with 1 after an error, which is printed."""
    try:
        code = run()
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = 1
        if isinstance(error, CommschedError):
            print(f"{program}: rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if is_consequence(error):
            let_the_cause_end_first(os.environ)
        else:
            record(error, os.environ)
    end(code)
