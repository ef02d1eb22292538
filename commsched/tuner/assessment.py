"""What the communication of a running job costs, what it could cost at the least, and what to do about it. Pure.

The step time and the time without waiting are this job's own. The bound is that of the measured layer times and network; see
``simulator/lower_bound.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..core.errors import ranks_text
from ..core.manifest import Manifest
from ..core.pace import PARTS_KEPT
from ..settings import Settings
from ..simulator.lower_bound import clipped_bound, first_share
from ..simulator.scenario import bytes_factor
from .learn import JobFacts
from .paced import Paced
from .profiler import Measured
from .result import milliseconds, size
from .space import MIN_TELLING_BYTES

#: Where less of a step than this is waited for, nothing can be gained.
NOTHING_TO_GAIN = 0.02

#: A smaller share of a step is not worth advice.
WORTH_ADVICE = 0.05

#: A rank is slower than rank 0 if it takes longer by at least this share of a step, in each of ``PARTS_KEPT`` parts.
SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class Assessment:
    """The cost of communication in a step, in seconds. None means that it is not known.

    Attributes:
        compute_seconds: the time that rank 0 does not wait. It includes what communication costs the processor.
        exposed_seconds: the rest of the step: waiting for averages that nothing hides.
        slowest_rank, late_seconds: the rank that computes longest, if it takes longer than rank 0, and the part of
            ``exposed_seconds`` for which ranks wait for it rather than for the network.
        seconds_per_byte: the time that the network takes for a byte of gradient.
        is_assumed: that time is not measured, but the most that a byte takes between processes of one machine.
        has_network: averages leave the host.
        is_shared: averages of other groups use the network, too, so the bound is not known.
        bound_seconds: the least time of a step over all orders of sending, with these layer times and this network.
        half_seconds: the bound if gradients travelled in 16 bits; None also if they do, or cannot.
        served_seconds, servers: the bound with so many parameter servers on machines of their own; None if they would not help.
        layers: name, bytes, forward, backward and waited seconds of each tensor.
    """

    paced: Paced
    gradient_bytes: int
    compute_seconds: float | None = None
    exposed_seconds: float | None = None
    slowest_rank: int | None = None
    late_seconds: float = 0.0
    seconds_per_byte: float | None = None
    is_assumed: bool = False
    has_network: bool = True
    is_shared: bool = False
    bound_seconds: float | None = None
    half_seconds: float | None = None
    served_seconds: float | None = None
    servers: int = 0
    layers: tuple[Mapping[str, Any], ...] = ()

    @property
    def communication_seconds(self) -> float | None:
        """The time for which the network is busy in a step."""
        return None if self.seconds_per_byte is None or self.is_shared else self.seconds_per_byte * self.gradient_bytes

    @property
    def is_within_machine(self) -> bool:
        """Whether the network is the memory of one machine."""
        return self.is_assumed or not self.has_network

    @property
    def shown_bound_seconds(self) -> float | None:
        """The bound, which is never above the step time: what was measured can be done."""
        return None if self.bound_seconds is None else min(self.bound_seconds, self.paced.step_seconds)


def assess(paced: Paced, manifest: Manifest, measured: Measured | None, job: JobFacts, settings: Settings) -> Assessment:
    """Assess the steps of the group of ``manifest``. What cannot be known from the arguments is left out.

    Args:
        measured: the profile of steps with the same configuration; None if there is none. If other groups share the network,
            only its rate is kept, since the bound and the time for which it is busy would be those of one group.
    """
    nbytes = manifest.nbytes
    per_byte = None if measured is None else measured.transfer_seconds_per_byte or measured.link.seconds_per_byte
    is_shared = measured is not None and measured.is_shared
    if paced.own_seconds is None:
        return Assessment(paced, nbytes, seconds_per_byte=per_byte, is_shared=is_shared)
    own, step = paced.own_seconds, paced.step_seconds
    slowest_rank, late = _latest_rank(paced)
    slowest = min(own + late, step)
    known: dict[str, Any] = {
        "compute_seconds": own,
        "exposed_seconds": step - own,
        "slowest_rank": slowest_rank or None,
        "late_seconds": slowest - own,
    }
    if measured is None or per_byte is None or is_shared:
        return Assessment(paced, nbytes, seconds_per_byte=per_byte, is_shared=is_shared, **known)
    if slowest > own:
        per_byte = _without_lateness(per_byte, measured, job)
    bound = _bound_of(measured, slowest, paced)
    servers = job.servers
    known["is_assumed"] = measured.is_assumed
    known["has_network"] = job.workers > 1
    known["bound_seconds"] = bound(per_byte, servers)
    known["layers"] = _layers(manifest, measured)
    if settings.wire == "none" and job.transport in _NARROWS and job.workers > 1 and _is_float32(manifest):
        known["half_seconds"] = bound(per_byte / 2, servers)
    now, least = bytes_factor(job.workers, servers), bytes_factor(job.workers, job.workers)
    if job.transport == "ps" and least < now:
        known["served_seconds"] = bound(per_byte * least / now, job.workers)
        known["servers"] = job.workers
    return Assessment(paced, nbytes, seconds_per_byte=per_byte, **known)


def _latest_rank(paced: Paced, parts: int = PARTS_KEPT) -> tuple[int, float]:
    """The rank that takes longest, and by how many seconds of a step it takes longer than rank 0; (0, 0.0) if none takes longer
    in each of at least ``parts`` parts. One that was disturbed for a while does not count: only its first parts were long."""
    ours = paced.own_by_rank.get(0, ())
    latest, late = 0, 0.0
    for rank, theirs in paced.own_by_rank.items():
        more = [there - here for here, there in zip(ours, theirs, strict=True)]
        if len(more) >= parts and min(more) >= SLOWER * paced.step_seconds and median(more) > late:
            latest, late = rank, median(more)
    return latest, late


def is_open(paced: Paced) -> bool:
    """Whether a rank takes longer than rank 0 so far, but not for long enough to say so."""
    return _latest_rank(paced, 1)[0] != _latest_rank(paced)[0]


def _without_lateness(seconds_per_byte: float, measured: Measured, job: JobFacts) -> float:
    """The time that the network takes for a byte of gradient if another rank is late, and averages therefore come late. The
    rate at which this rank's own contributions leave does not depend on that. With a hierarchy they are the host's."""
    sending = measured.sending_seconds_per_byte
    if sending is None or job.workers != job.world_size:
        return seconds_per_byte
    # Each byte of a shard on this rank's machine leaves it twice, as a contribution and as an average of others'.
    return min(seconds_per_byte, sending if job.servers else 2 * sending)


#: The transports with the setting ``wire``.
_NARROWS = ("ps", "gloo", "mpi")


def _is_float32(manifest: Manifest) -> bool:
    return sum(spec.nbytes for spec in manifest.tensors if spec.dtype == "float32") > manifest.nbytes / 2


def _bound_of(measured: Measured, compute_seconds: float, paced: Paced) -> Callable[[float, int], float]:
    """The bound as a function of the seconds per byte and the number of servers, for layers that take ``compute_seconds`` in
    all."""
    profile = measured.profile
    factor = compute_seconds / profile.compute_seconds if profile.compute_seconds > 0 else 0.0
    backward = [factor * layer.backward_seconds for layer in profile.layers]
    forward = [factor * layer.forward_seconds for layer in profile.layers]
    if paced.full_wait is not None and sum(backward) > 0:
        # All averages are waited for before the forward, so its waits do not show which layer takes how long.
        forward = [sum(forward) * each / sum(backward) for each in backward]

    def bound(seconds_per_byte: float, servers: int) -> float:
        comm = [seconds_per_byte * layer.nbytes for layer in profile.layers]
        return clipped_bound(forward, backward, comm, first_share(paced.needs_norm, servers > 0))

    return bound


def _layers(manifest: Manifest, measured: Measured) -> tuple[Mapping[str, Any], ...]:
    times = {layer.name: layer for layer in measured.profile.layers}
    return tuple(
        {
            "name": spec.name,
            "bytes": spec.nbytes,
            "forward_seconds": times[spec.name].forward_seconds,
            "backward_seconds": times[spec.name].backward_seconds,
            "waited_seconds": measured.waited_seconds.get(spec.name, 0.0),
        }
        for spec in manifest.tensors
    )


# --- in words ---


def in_words(found: Assessment, settings: Settings) -> list[str]:
    """``found`` as two lines for the user: what a step takes, and what to do about it."""
    what = _what(found)
    advice, same = _advice(found, settings), found.paced.same_gradients
    if same:
        advice = [
            "; ".join((f"{ranks_text(same, 8)} seem to train on the same batches, so their steps are worth one", *advice))
        ]
    return [f"{what}{_least(found)}", *advice]


def last_lines(found: Assessment, now: Paced) -> list[str]:
    """The lines at the end of the job. ``now``: its last steps."""
    return [_last_line(found, now), *_layers_line(found)]


#: The number of layers that the end of the job names.
_NAMED_LAYERS = 5


def _layers_line(found: Assessment) -> list[str]:
    """The layers that a step waited for longest, if it waited for them one by one, and long enough to be worth a line."""
    step = found.paced.step_seconds
    waits = sorted(found.layers, key=lambda layer: layer["waited_seconds"], reverse=True)
    total = sum(layer["waited_seconds"] for layer in waits)
    if total < NOTHING_TO_GAIN * step or found.paced.full_wait is not None:
        return []
    named = [each for each in waits[:_NAMED_LAYERS] if each["waited_seconds"] > 0]
    texts = [f"{each['name']} ({size(each['bytes'])}) {_ms(each['waited_seconds'], step)}" for each in named]
    rest = total - sum(each["waited_seconds"] for each in named)
    others = sum(each["waited_seconds"] > 0 for each in waits) - len(named)
    if others:
        texts.append(f"{others} more {_ms(rest, step)}")
    return [f"in the steps that were profiled, the forward waited for {', '.join(texts)}"]


def _last_line(found: Assessment, now: Paced) -> str:
    step = now.step_seconds
    line = f"{now.steps} steps, at the end {_ms(step, step)} each"
    if now.own_seconds is None:
        return line
    exposed = step - now.own_seconds
    line += f": {_ms(now.own_seconds, step)} of computation and {_ms(exposed, step)} of exposed communication"
    line += f" ({_percent(exposed, step)})"
    bound = found.shown_bound_seconds
    return line if bound is None else f"{line}; the bound was {_ms(bound, step)}"


def _what(found: Assessment) -> str:
    paced, step = found.paced, found.paced.step_seconds
    line = f"after {paced.steps} steps, a step takes {_ms(step, step)}"
    if found.compute_seconds is None or found.exposed_seconds is None:
        if (busy := found.communication_seconds) is not None:
            line += f", and the network is busy for {_ms(busy, step)} of it; this engine does not show what it waits for"
        return line
    line += (
        f": {_ms(found.compute_seconds, step)} of computation and {_ms(found.exposed_seconds, step)} of exposed communication"
    )
    line += f" ({_percent(found.exposed_seconds, step)})"
    if found.late_seconds > 0:
        line += f", {_ms(found.late_seconds, step)} of which are for rank {found.slowest_rank}, which computes longer"
    return line


def _least(found: Assessment) -> str:
    if found.is_shared:
        return "; the bound is not known, since averages of other tensors use the network, too"
    bound = found.shown_bound_seconds
    if bound is None or found.seconds_per_byte is None:
        return ""
    rate, bound_ms = _rate(found.seconds_per_byte), _ms(bound, found.paced.step_seconds)
    network = f"{'at least ' if found.is_assumed else ''}{rate} of gradients"
    if found.is_within_machine:
        network += " within one machine"
    return f"; with this model and network ({network}) the bound is {bound_ms}"


def _advice(found: Assessment, settings: Settings) -> list[str]:
    paced, step = found.paced, found.paced.step_seconds
    if found.exposed_seconds is None:
        busy = found.communication_seconds
        small = busy is not None and busy < NOTHING_TO_GAIN * step
        return [f"the network is busy for {_percent(busy or 0.0, step)} of a step: nothing can be gained"] if small else []
    if found.exposed_seconds < NOTHING_TO_GAIN * step:
        return [f"communication is {_percent(found.exposed_seconds, step)} of a step: nothing can be gained"]
    said = []
    bound = found.shown_bound_seconds
    if found.late_seconds >= WORTH_ADVICE * step:
        said.append(f"rank {found.slowest_rank} is slow, and no network changes that: give it less work, or a faster machine")
        if found.exposed_seconds - found.late_seconds < WORTH_ADVICE * step:
            return said
    wait = paced.full_wait
    if wait is not None and wait.seconds >= WORTH_ADVICE * wait.step_seconds:
        text = f"{wait.line} waits for all averages ({wait.why}), which the next forward cannot overlap"
        if bound is not None and bound < (1 - WORTH_ADVICE) * step:
            text += f"; without that a step takes {_ms(bound, step)} at best"
        said.append(text)
    elif bound is not None:
        said += _setting(found, bound, settings)
    said += _less_traffic(found, bound)
    return ["; ".join(said)] if said else []


def _setting(found: Assessment, bound: float, settings: Settings) -> list[str]:
    step = found.paced.step_seconds
    if bound >= (1 - WORTH_ADVICE) * step:
        return ["that is within 5 % of the bound: no other order or size of messages helps"]
    more = f"{_percent(step - bound, bound)} above the bound"
    if found.is_within_machine:
        return [f"{more}: within one machine messages take the ranks' own processors, not a network"]
    if found.paced.config.policy != "priority":
        return [f"{more}: try policy=priority"]
    if found.gradient_bytes < MIN_TELLING_BYTES:
        return [f"{more}: that is the cost of messages; so few bytes leave no sizes to choose"]
    if not settings.given.isdisjoint({"partition", "credit"}):
        return [f"{more}: leave partition and credit open, so that commsched chooses them"]
    if settings.tune is None and settings.tuned is None:
        return [f"{more}: commsched tune may find better sizes"]
    return [f"{more}: that is the cost of messages"]


def _less_traffic(found: Assessment, bound: float | None) -> list[str]:
    """What would save bytes, if the bound falls by it."""
    if bound is None:
        return []
    said = []
    for seconds, how in (
        (found.half_seconds, "wire=bfloat16 (16 bits on the network)"),
        (found.served_seconds, f"{found.servers} servers on machines of their own"),
    ):
        if seconds is not None and seconds < (1 - WORTH_ADVICE) * bound:
            said.append(f"{how}: {_ms(seconds, found.paced.step_seconds)} at best")
    return said


def _ms(seconds: float, like: float) -> str:
    """Milliseconds, with the decimals that suit the step time ``like``."""
    return f"{milliseconds(seconds, like)} ms"


def _rate(seconds_per_byte: float) -> str:
    megabytes = 1e-6 / seconds_per_byte
    return f"{megabytes:.3g} MB/s" if megabytes < 1000 else f"{megabytes / 1000:.3g} GB/s"


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole > 0 else 0.0
    return f"{share:.1f} %" if share < 1 else f"{share:.0f} %"
