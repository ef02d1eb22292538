"""How fast one training iteration can be on a given network, and what the usual orders of sending take. Pure.

The model: backward starts at time 0 and goes from the last layer to the first; layer ``h``'s gradient exists when
``backward_seconds[h:]`` have passed; one network resource averages it in ``comm_seconds[h]``; the next forward goes from
the first layer to the last, and each layer waits for its own average. Compute is serial, partitions are infinitely small
and cost nothing by themselves; ``partitioned_bound`` and ``window_bound`` are for those of a real cut.

In every function index 0 is the layer at the input side, the sequences have one item per layer, and times are seconds.
``comm_seconds[h]`` is ``bytes_factor(...) * bytes of layer h / bytes per second of a NIC``; that factor is in
``commsched.simulator.bytes_factor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Term = Literal["compute", "input", "bandwidth", "interior"]


def lower_bound(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """``T*``: the least time of one iteration over all schedules, reached by sending the front-most ready layer first.

    ``T* = max(Tf + Tb, max_h(b_h + .. + b_L + c_1 + .. + c_h + f_h + .. + f_L))``. It is the problem ``1 | r_i, q_i, pmtn |
    Cmax`` with the release times ``r_i = b_i + .. + b_L`` and the tails ``q_i = f_i + .. + f_L``, which preemptive
    largest-tail-first solves (Jackson's rule; J. Carlier, "The one-machine sequencing problem", EJOR 1982). Both fall with
    ``i``, so the largest tail is the smallest index, and for each ``h`` the set that binds is layers ``1..h``: nothing of
    them can be sent before ``r_h``, the forward of ``h`` needs them all, and ``q_h`` is left to do.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    paths = _paths(forward_seconds, backward_seconds, comm_seconds)
    return max([sum(forward_seconds) + sum(backward_seconds), *paths])


@dataclass(frozen=True)
class Binding:
    """What an iteration cannot be faster for.

    ``term`` is ``compute`` (communication can be hidden), ``input`` (the first layer's gradients, which come last),
    ``bandwidth`` (all bytes in a row) or ``interior`` (the layers up to one in the middle). ``layer`` is the last of the
    layers ``0..layer`` whose communication takes longest to fit in, whether or not it binds; None without layers.
    """

    term: Term
    layer: int | None
    seconds: float


def binding(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> Binding:
    """Which of the terms of :func:`lower_bound` is greatest; ``seconds`` is ``T*``.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    paths = _paths(forward_seconds, backward_seconds, comm_seconds)
    compute = sum(forward_seconds) + sum(backward_seconds)
    if not paths:
        return Binding("compute", None, compute)
    layer = max(range(len(paths)), key=paths.__getitem__)
    # A layer that sends nothing changes neither end: the first and the last that count are those with bytes.
    sending = [index for index, seconds in enumerate(comm_seconds) if seconds > 0]
    if not sending or compute >= paths[layer]:
        return Binding("compute", layer, compute)
    term: Term = "bandwidth" if layer == sending[-1] and layer > 0 else "input" if layer <= sending[0] else "interior"
    return Binding(term, layer, paths[layer])


def wfbp(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """Wait-free back-propagation: layers are sent as backward produces them, and the forward waits for all of them.

    ``max_h(b_h + .. + b_L + c_1 + .. + c_h) + Tf`` (H. Zhang et al., "Poseidon", ATC 2017; what DDP does, without its buckets).
    Dropping the barrier but not the order gives the same time, because the first layer is sent last.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    _check(forward_seconds, backward_seconds, comm_seconds)
    ready = _suffix_sums(backward_seconds)
    sent = accumulate(comm_seconds)
    return max((r + c for r, c in zip(ready, sent)), default=0) + sum(forward_seconds)


def bucketed_wfbp(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    buckets: Sequence[tuple[int, float]],
    overhead_seconds: float = 0.0,
) -> float:
    """WFBP with several layers sent as one, as DDP and Horovod do: ``E_k = max(E_k-1, ready_k) + overhead + comm_k``.

    Args:
        buckets: front-most layer and communication seconds of each, in the order in which they are sent; a bucket is ready
            with the gradient of its front-most layer, which backward produces last.
        overhead_seconds: what each bucket costs by itself.

    Raises:
        ValueError: the sequences differ in length, a time is negative, or a layer is not there.
    """
    _check(forward_seconds, backward_seconds, [0.0] * len(forward_seconds))
    _check_partitions(len(forward_seconds), buckets, overhead_seconds)
    ready = _suffix_sums(backward_seconds)
    ended = sum(backward_seconds)  # the forward waits for backward, even if nothing is sent
    link = 0.0
    for front, seconds in buckets:
        link = max(link, ready[front]) + overhead_seconds + seconds
    return max(ended, link) + sum(forward_seconds)


def dear(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """DeAR: reduce-scatter in backward order, and when all of it is over all-gather in forward order, half the time each.

    ``max_h(r_h + RS_1 + .. + RS_h) + max_h(AG_1 + .. + AG_h + q_h)`` (L. Zhang et al., "DeAR", ICDCS 2023, without fusion).

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    _check(forward_seconds, backward_seconds, comm_seconds)
    sent = [seconds / 2 for seconds in accumulate(comm_seconds)]
    ready, tail = _suffix_sums(backward_seconds), _suffix_sums(forward_seconds)
    scattered = max((r + c for r, c in zip(ready, sent)), default=0.0)
    return scattered + max((c + q for c, q in zip(sent, tail)), default=0.0)


def serial(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """No overlap: all of backward, then all of the communication, then all of forward.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    _check(forward_seconds, backward_seconds, comm_seconds)
    return sum(backward_seconds) + sum(comm_seconds) + sum(forward_seconds)


def partitioned_bound(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    partitions: Sequence[tuple[int, float]],
    overhead_seconds: float = 0.0,
) -> float:
    """``T*(c')``: the least time over all schedules of a given cut whose partitions hold the link a while longer each.

    ``c'_i = c_i + messages_i * overhead``. A partition of several layers is sent when the gradient of the front-most exists,
    and that layer's forward waits for it: what merging costs is in the bound too.

    Args:
        partitions: front-most layer and communication seconds of each, in forward order.
        overhead_seconds: what each partition holds the network resource besides its bytes.

    Raises:
        ValueError: the sequences differ in length, a time is negative, or a layer is not there.
    """
    _check(forward_seconds, backward_seconds, [0.0] * len(forward_seconds))
    _check_partitions(len(forward_seconds), partitions, overhead_seconds)
    ready, tail = _suffix_sums(backward_seconds), _suffix_sums(forward_seconds)
    sent = accumulate(seconds + overhead_seconds for _, seconds in partitions)
    paths = (ready[front] + c + tail[front] for (front, _), c in zip(partitions, sent))
    return max([sum(forward_seconds) + sum(backward_seconds), *paths])


def window_bound(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    partitions: Sequence[tuple[int, float]],
    window_seconds: float,
    overhead_seconds: float = 0.0,
) -> float:
    """What priority order takes at most on one resource when partitions already committed are not called back.

    ``T <= T*(c') + phi W / B + N_W overhead``: when the link was last idle or ended a less urgent message, before the
    critical partition, that message had been committed while nothing critical was ready; all that could stand before the
    critical ones are the ``W`` bytes in ``N_W`` messages committed then.

    Args:
        partitions, overhead_seconds: as for :func:`partitioned_bound`.
        window_seconds: the credit in seconds of communication, ``phi W / B``; the largest partition counts if it is more.

    Raises:
        ValueError: the sequences differ in length, a time is negative, or a layer is not there.
    """
    best = partitioned_bound(forward_seconds, backward_seconds, partitions, overhead_seconds)
    if window_seconds < 0:
        raise ValueError("a time is negative")
    if not partitions:
        return best
    window = max(window_seconds, *(seconds for _, seconds in partitions))
    smallest_first = accumulate(sorted(seconds for _, seconds in partitions))
    messages = max(1, sum(total <= window * (1 + 1e-12) for total in smallest_first))
    return best + window + messages * overhead_seconds


def best_partition(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    nbytes: Sequence[int],
    seconds_per_byte: float,
    overhead_seconds: float,
    committed_messages: float = 2.0,
    processor_seconds: float = 0.0,
) -> float:
    """The partition size, in bytes, at which overhead and lost preemption cost the least together.

    It minimises ``S / size * overhead + all / size * processor + m * size * seconds_per_byte``, where ``S`` are the bytes of
    the layers up to the one that binds (see :func:`binding`): without ``processor_seconds`` it is ``sqrt(overhead * S / (m
    seconds_per_byte))``.

    Args:
        seconds_per_byte: of gradient, on the busiest NIC: ``bytes_factor / bytes per second``.
        overhead_seconds: what each partition costs by itself.
        processor_seconds: what each partition, wherever it is in the model, takes of the processor that computes.
        committed_messages: ``m``, partitions in the credit window, and one more if a parameter server passes them on.

    Raises:
        ValueError: the sequences differ in length, a time is negative, or a rate or ``committed_messages`` is not positive.
    """
    if seconds_per_byte <= 0 or committed_messages <= 0 or min(overhead_seconds, processor_seconds) < 0:
        raise ValueError(
            f"no partition is best with {seconds_per_byte} s per byte, {overhead_seconds} s per message and "
            f"{committed_messages} messages committed"
        )
    layer = binding(forward_seconds, backward_seconds, [seconds_per_byte * size for size in nbytes]).layer
    critical = 0 if layer is None else sum(nbytes[: layer + 1])
    cost = overhead_seconds * critical + processor_seconds * sum(nbytes)
    return math.sqrt(cost / (committed_messages * seconds_per_byte))


def _paths(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> list[float]:
    """For each ``h``: ``b_h + .. + b_L + c_1 + .. + c_h + f_h + .. + f_L``."""
    _check(forward_seconds, backward_seconds, comm_seconds)
    ready, tail = _suffix_sums(backward_seconds), _suffix_sums(forward_seconds)
    return [r + c + q for r, c, q in zip(ready, accumulate(comm_seconds), tail)]


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


def _check(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> None:
    lengths = len(forward_seconds), len(backward_seconds), len(comm_seconds)
    if len(set(lengths)) != 1:
        raise ValueError(f"forward, backward and communication have {lengths[0]}, {lengths[1]} and {lengths[2]} layers")
    if any(seconds < 0 for times in (forward_seconds, backward_seconds, comm_seconds) for seconds in times):
        raise ValueError("a time is negative")


def _check_partitions(layers: int, partitions: Sequence[tuple[int, float]], overhead_seconds: float) -> None:
    if overhead_seconds < 0 or any(seconds < 0 for _, seconds in partitions):
        raise ValueError("a time is negative")
    for front, _ in partitions:
        if not 0 <= front < layers:
            raise ValueError(f"a partition begins in layer {front}, but the layers are 0 to {layers - 1}")
