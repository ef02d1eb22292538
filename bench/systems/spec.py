"""What ``--systems`` says of one system: ``commsched``, or with what its gradients travel by, ``commsched:gloo+rsag``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commsched.core.errors import ConfigError

from ..arguments import require_named
from . import ON_COMMSCHED, require

#: Each rank or server orders what it sends by itself there, and nothing but all-reduce is a task.
UNORDERED = frozenset({"local", "ps"})

#: Those that put front layers first, whose policy may therefore be ``rsag`` instead of ``priority``.
_FRONT_FIRST = frozenset({"commsched", "p3", "tictac"})


@dataclass(frozen=True)
class Way:
    """How gradients travel, and where their order is from: what a session has only one of. ``order`` as in ``Settings``."""

    transport: str
    order: str = "agreed"


@dataclass(frozen=True)
class SystemSpec:
    """``text`` is how it was asked for and is called, ``base`` the file in ``bench/systems``, ``way`` None that of the job.

    ``policy`` is what those that put front layers first run with: ``priority``, or ``rsag``.
    """

    text: str
    base: str
    way: Way | None = None
    policy: str = "priority"

    def caps_itself(self, transport: str) -> bool:
        """Whether it can be held to a rate where links are not shaped; ``transport`` is the job's."""
        return self.base in ON_COMMSCHED and (self.way.transport if self.way else transport) in UNORDERED


def parse(text: str) -> SystemSpec:
    """``NAME`` or ``NAME:TRANSPORT[+rsag][+static]``.

    Raises:
        ConfigError: there is no such system or transport, or it cannot be had so; says why.
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
    if "rsag" in wanted and base not in _FRONT_FIRST:
        raise ConfigError(f"systems: {text!r}: rsag puts front layers first, and {base} does not")
    way = Way(transport, "static" if "static" in wanted else "agreed")
    return SystemSpec(text, base, way, "rsag" if "rsag" in wanted else "priority")


def way_of_job(specs: Sequence[SystemSpec], transport: str) -> Way:
    """What the ranks' own session has: ``transport``, unless each system says what it wants."""
    return Way(transport) if any(spec.way is None for spec in specs) else specs[0].way or Way(transport)
