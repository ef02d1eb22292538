"""The least time of one training iteration on a given network, and the times of the usual orders of sending. Pure.

The model: backward starts at time 0 and goes from the last layer to the first. Layer ``h``'s gradient exists when
``backward_seconds[h:]`` have passed. One network resource averages it in ``comm_seconds[h]``. The next forward goes from the
first layer to the last, and each layer waits for its own average. Compute is serial. Partitions are infinitely small and have
no overhead; ``partitioned_bound`` and ``window_bound`` are for the partitions of a real cut.

In every function index 0 is the layer at the input side, the sequences have one item per layer, and times are seconds.
``comm_seconds[h]`` is ``bytes_factor(...) * bytes of layer h / bytes per second of a NIC``; that factor is in
``commsched.simulator.scenario``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def lower_bound(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """``T*``: the least time of one iteration over all schedules. Sending the front-most ready layer first reaches it.

    ``T* = max(Tf + Tb, max_h(b_h + .. + b_L + c_1 + .. + c_h + f_h + .. + f_L))``. This is the problem ``1 | r_i, q_i, pmtn |
    Cmax`` with the release times ``r_i = b_i + .. + b_L`` and the tails ``q_i = f_i + .. + f_L``. Preemptive largest-tail-first
    solves it (Jackson's rule; J. Carlier, "The one-machine sequencing problem", EJOR 1982). Both fall with ``i``, so the layer
    with the smallest index has the largest tail. For each ``h`` the binding set is the layers ``1..h``: none of them can be
    sent before ``r_h``, the forward of ``h`` needs all of them, and ``q_h`` remains after that.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    paths = _paths(forward_seconds, backward_seconds, comm_seconds)
    return max([sum(forward_seconds) + sum(backward_seconds), *paths])


def wfbp(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """Wait-free back-propagation: layers are sent as backward produces them, and the forward waits for all of them.

    ``max_h(b_h + .. + b_L + c_1 + .. + c_h) + Tf`` (H. Zhang et al., "Poseidon", ATC 2017; same as DDP without its buckets).
    Without the barrier but in the same order the time is the same, because the first layer is sent last.

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
    """WFBP with several layers sent as one bucket, as in DDP and Horovod: ``E_k = max(E_k-1, ready_k) + overhead + comm_k``.

    Args:
        buckets: front-most layer and communication seconds of each bucket, in the order of sending. A bucket is ready with the
            gradient of its front-most layer, which backward produces last.
        overhead_seconds: overhead of each bucket, besides its bytes.

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
    """DeAR: reduce-scatter in backward order; after all of it, all-gather in forward order. Each takes half the time.

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
    """No overlap: all of backward, then all communication, then all of forward.

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
    """``T*(c')``: the least time over all schedules of a given cut whose partitions have an overhead on the link.

    ``c'_i = c_i + messages_i * overhead``. A partition of several layers is sent when the gradient of its front-most layer
    exists, and that layer's forward waits for it. The bound therefore includes the cost of merging.

    Args:
        partitions: front-most layer and communication seconds of each partition, in forward order.
        overhead_seconds: additional time for which each partition occupies the network resource.

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
    """The greatest time of priority order on one resource if committed partitions cannot be recalled.

    ``T <= T*(c') + phi W / B + N_W overhead``. Consider the last moment before the critical partition at which the link was
    idle or ended a less urgent message. That message was committed while nothing critical was ready. Only the ``W`` bytes in
    ``N_W`` messages that were committed then can precede the critical ones.

    Args:
        partitions, overhead_seconds: as for :func:`partitioned_bound`.
        window_seconds: the credit in seconds of communication, ``phi W / B``; the largest partition counts instead if it takes
            longer.

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


def _paths(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> list[float]:
    """The sum ``b_h + .. + b_L + c_1 + .. + c_h + f_h + .. + f_L`` for each ``h``."""
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
