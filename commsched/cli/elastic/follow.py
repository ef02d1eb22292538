"""A launcher of an elastic job that another one hosts: it starts and ends processes on its machine as that one orders."""

from __future__ import annotations

import threading
from typing import Any

from ...control.elastic_messages import Closes, EndAll, HostAnswer, LauncherHello, Over
from ...core.errors import ConfigError
from ..launch import Among, ranks_number, signal_name, tell_user
from . import links
from .machine import LocalMachine, Signalled


def follow(machine: LocalMachine, among: Among, settings: dict[str, Any], within_seconds: float) -> int:
    """Start and end processes on this machine, as the launcher that hosts the job orders."""
    peer = f"the launcher at {among.address}, which hosts the job,"

    def hello(own_host: str) -> LauncherHello:
        machine.host = among.host or own_host
        return LauncherHello(settings, machine.room, machine.host)

    try:
        link = links.connect_to_host(among, hello, within_seconds, lambda: machine.interrupted_by > 0)
    except ConfigError:
        if machine.interrupted_by:
            return 128 + machine.interrupted_by
        raise
    threading.Thread(target=_hear, args=(link, machine), name="commsched-launcher", daemon=True).start()
    try:
        while True:
            event = machine.events.get()
            match event:
                case links.Told(HostAnswer(problem)):
                    if problem:
                        raise ConfigError(f"{peer} does not take this one: {problem}")
                    tell_user(
                        f"{machine.host} takes part in the job of {among.address}, with room for {ranks_number(machine.room)}"
                    )
                case links.Told(Over(exit_code, sentence)):
                    if sentence:
                        tell_user(sentence)
                    return exit_code
                case links.Told(message):
                    if isinstance(message, EndAll) and message.number:
                        tell_user(f"{peer} has got {signal_name(message.number)}, and the job ends")
                    machine.do(message)
                case links.Gone(_, why):
                    if machine.interrupted_by:
                        return 128 + machine.interrupted_by
                    tell_user(f"{peer} is lost ({why}), and the job with it")
                    return 1
                case _:
                    report = machine.reported(event)
                    if isinstance(report, Signalled):
                        link.send(Closes())
                    elif report is not None:
                        link.send(report)
            if machine.interrupted_by and machine.is_empty:
                return 128 + machine.interrupted_by
    finally:
        link.close()


def _hear(link: links.Link, machine: LocalMachine) -> None:
    why = "it ended the connection"
    try:
        for message in link.messages():
            machine.events.put(links.Told(message))
    except links.LinkLost as lost:
        why = str(lost)
    machine.events.put(links.Gone(None, why))
