"""The systems that are compared, found by name: ``ddp-tuned`` is ``bench/systems/ddp_tuned.py``.

To add a system, add one file here with ``SYSTEM``, a :class:`~bench.harness.system.SystemInfo`: its colour, how the simulator
runs it, and ``make_system(context)``. That trains a model of ``context.workload`` with plain SGD of ``LEARNING_RATE`` and
averages its gradients over all ranks. A system on Horovod would need little more than a wrapped optimizer.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from commsched import ConfigError
from commsched.core.scheduler import LAUNCH_ORDERS
from commsched.transports import users_of

from ..harness.arguments import require_named
from ..harness.system import Carrier, Context, System, SystemInfo


def _found() -> dict[str, SystemInfo]:
    files = [module.name for module in pkgutil.iter_modules(__path__)]
    systems = {name.replace("_", "-"): import_module(f"{__name__}.{name}").SYSTEM for name in files}
    return dict(sorted(systems.items(), key=lambda item: item[1].order))


#: All systems by name, in the order of plots.
SYSTEMS: Mapping[str, SystemInfo] = _found()


def names() -> list[str]:
    """The names of the systems that can be trained, sorted. The others are only simulated."""
    return sorted(name for name, system in SYSTEMS.items() if system.make_system is not None)


def make(name: str, context: Context) -> System:
    """Make the system of that name. Collective.

    Raises:
        ConfigError: there is no such system; the message lists all systems.
    """
    make_system = SYSTEMS[require(name)].make_system
    assert make_system is not None, "require() accepts only systems that can be trained"
    return make_system(context)


def require(name: str) -> str:
    """Return ``name`` if there is such a system and it can be trained.

    Raises:
        ConfigError: there is no such system; the message lists all systems.
    """
    if name not in names():
        raise ConfigError(f"systems: {name!r} is unknown; there are: {', '.join(names())}")
    return name


@dataclass(frozen=True)
class SystemSpec:
    """The specification of one system in ``--systems``: a name (``commsched``), or a name with a transport
    (``commsched:gloo+rsag``). ``text`` is the specification, which is also the system's name. ``base`` is the file in
    ``bench/systems``. ``carrier`` None means the carrier of the job.
    """

    text: str
    base: str
    carrier: Carrier | None = None

    def caps_itself(self, transport: str) -> bool:
        """Whether the system can limit its own rate if links are not shaped. ``transport`` is the job's transport."""
        own = self.carrier.transport if self.carrier else transport
        return SYSTEMS[self.base].is_on_commsched and own in users_of("rate")


def parse(text: str) -> SystemSpec:
    """``NAME`` or ``NAME:TRANSPORT[+rsag][+static|+agreed]``. An order that is not named chooses itself.

    Raises:
        ConfigError: there is no such system or transport, or the combination is not possible; the message says why.
    """
    name, colon, rest = text.partition(":")
    base = require(name)
    if not colon:
        return SystemSpec(text, base)
    if not SYSTEMS[base].is_on_commsched:
        raise ConfigError(f"systems: {text!r}: {base} does not run on a transport of commsched")
    transport, *wanted = rest.split("+")
    require_named(transport)
    orders = [word for word in wanted if word in LAUNCH_ORDERS]
    for word in wanted:
        if word not in ("rsag", *LAUNCH_ORDERS) or wanted.count(word) > 1 or len(orders) > 1:
            raise ConfigError(f"systems: {text!r}: after the transport come +rsag, and +static or +agreed, each once at most")
        if transport not in users_of("collective" if word == "rsag" else "order"):
            raise ConfigError(f"systems: {text!r}: {transport} has no {word}, which is for collectives")
    order = orders[0] if orders else "auto"
    return SystemSpec(text, base, Carrier(transport, order, "rsag" if "rsag" in wanted else "all_reduce"))


def carrier_of_job(specs: Sequence[SystemSpec], transport: str) -> Carrier:
    """The carrier of the ranks' own session: ``transport``, unless every system names its own; then the carrier of the first
    system."""
    return Carrier(transport) if any(spec.carrier is None for spec in specs) else specs[0].carrier or Carrier(transport)
