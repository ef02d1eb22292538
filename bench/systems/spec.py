"""The specification of one system in ``--systems``: a name (``commsched``), or a name with a transport
(``commsched:gloo+rsag``). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commsched.core.errors import ConfigError

from ..harness.arguments import require_named
from . import ON_COMMSCHED, require

#: Transports with which each rank or server orders its messages by itself. Their only tasks are all-reduces.
UNORDERED = frozenset({"local", "ps"})


@dataclass(frozen=True)
class Way:
    """The way in which gradients travel: a transport and an order. A session has exactly one way. ``order`` is as in
    ``Settings``."""

    transport: str
    order: str = "agreed"


@dataclass(frozen=True)
class SystemSpec:
    """A system to measure. ``text`` is the specification, which is also the system's name. ``base`` is the file in
    ``bench/systems``. ``way`` None means the way of the job. ``collective`` is as in ``Settings``.
    """

    text: str
    base: str
    way: Way | None = None
    collective: str = "all_reduce"

    def caps_itself(self, transport: str) -> bool:
        """Whether the system can limit its own rate if links are not shaped. ``transport`` is the job's transport."""
        return self.base in ON_COMMSCHED and (self.way.transport if self.way else transport) in UNORDERED


def parse(text: str) -> SystemSpec:
    """``NAME`` or ``NAME:TRANSPORT[+rsag][+static]``.

    Raises:
        ConfigError: there is no such system or transport, or the combination is not possible; the message says why.
    """
    name, colon, rest = text.partition(":")
    base = require(name)
    if not colon:
        return SystemSpec(text, base)
    if base not in ON_COMMSCHED:
        raise ConfigError(f"systems: {text!r}: {base} does not run on a transport of commsched")
    transport, *wanted = rest.split("+")
    require_named(transport)
    for word in wanted:
        if word not in ("rsag", "static") or wanted.count(word) > 1:
            raise ConfigError(f"systems: {text!r}: after the transport come +rsag and +static, each once at most")
        if transport in UNORDERED:
            raise ConfigError(f"systems: {text!r}: {transport} has no {word}, which is for collectives")
    way = Way(transport, "static" if "static" in wanted else "agreed")
    return SystemSpec(text, base, way, "rsag" if "rsag" in wanted else "all_reduce")


def way_of_job(specs: Sequence[SystemSpec], transport: str) -> Way:
    """The way of the ranks' own session: ``transport``, unless every system names its own way; then the way of the first
    system."""
    return Way(transport) if any(spec.way is None for spec in specs) else specs[0].way or Way(transport)
