"""The one line that every job begins with: who takes part, over which transport, what travels, and in which portions."""

from __future__ import annotations

from collections.abc import Callable

from .core.config import SchedulerConfig, Settings
from .core.manifest import Manifest
from .tuner.text import size


def first_line(
    settings: Settings, transport: str, ordered: bool, ranks: int, hosts: int, config: SchedulerConfig, manifest: Manifest
) -> str:
    """For the tensors of ``manifest``, which ``config`` cuts and orders. ``ordered``: the ranks of ``transport`` launch in one
    order."""
    way = f"{transport} over {settings.lane}" if transport == "ps" else transport
    if settings.servers:
        way += f" with {_count(len(settings.servers), 'server')}"
    parts = [
        f"{_count(ranks, 'rank')} on {_count(hosts, 'host')}",
        way,
        f"{_count(len(manifest.tensors), 'tensor')} of {size(manifest.nbytes)} per step",
        f"partition {size(config.partition_bytes)}",
        f"credit {size(config.credit_bytes)}",
        config.policy,
    ]
    if ordered:
        parts.append(f"{settings.order} order")
    if settings.wire != "none":
        parts.append(f"{settings.wire} on the wire")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class FirstLine:
    """Says the line when the first group of gradients is registered: only then is known what travels."""

    def __init__(self, say: Callable[[str], None], describe: Callable[[Manifest], str]) -> None:
        self._say = say
        self._describe = describe
        self._said = False

    def on_register(self, group: int, manifest: Manifest) -> None:
        """For ``Session.on_register``."""
        if not self._said:
            self._said = True
            self._say(self._describe(manifest))
