"""The least time of one training iteration on a given network, and the time of sending as backward produces. Pure.

The model: backward starts at time 0 and goes from the last layer to the first. Layer ``h``'s gradient exists when
``backward_seconds[h:]`` have passed. One network resource averages it in ``comm_seconds[h]``. The next forward goes from the
first layer to the last, and each layer waits for its own average. Compute is serial. Partitions are infinitely small and have
no overhead; ``partitioned_bound`` is for the partitions of a real cut. In a loop for which ``clipped_bound`` is, every update
needs a norm of all averages.

In every function index 0 is the layer at the input side, the sequences have one item per layer, and times are seconds.
``comm_seconds[h]`` is ``bytes_factor(...) * bytes of layer h / bytes per second of a NIC``; that factor is in
``scenario``.
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


def clipped_bound(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    comm_seconds: Sequence[float],
    first_share: float = 0.5,
) -> float:
    """The least time of one iteration over all schedules if every update needs the norm of all averages, as with
    ``clip_grad_norm_``, or has to know whether all are finite, as with ``GradScaler``.

    An average travels in two halves. The first half (a reduce-scatter, or pushes to shards) takes ``a_i`` and leaves each part
    of the average on one machine. The second half (an all-gather, or replies) takes ``g_i`` on the same link and brings the
    parts to all ranks. The norm is known as soon as all first halves have arrived, since each machine can add up the squares of
    its own parts; the message with the sums takes no time here. A second half may travel before the norm is known, because the
    update applies the factor that the norm gives. So each part of ``g_i`` may follow its part of ``a_i`` at once. The forward
    of a layer with parameters needs the norm, its own ``g_i``, and the forwards before it.

    All ``a_i`` are therefore jobs with the release time ``r_i = b_i + .. + b_L`` and one tail, that of the first layer with
    parameters. All ``g_i`` are jobs with the release time ``r_i`` and the tail ``q_i = f_i + .. + f_L``. Without the rule that
    ``g_i`` follows ``a_i``, preemptive largest-tail-first is optimal (see :func:`lower_bound`). It keeps that rule by itself:
    it sends a second half only while no ready first half is left. So the optimal schedule is: all ready first halves, in any
    order, then second halves from the front. It takes the greatest sum of least release, work and least tail over all sets of
    jobs. These sets are the first halves of the layers ``1..h`` with the second halves of the layers ``1..k``, ``k <= h``::

        max(Tf + Tb, max_{k <= h}(b_h + .. + b_L + a_1 + .. + a_h + g_1 + .. + g_k + f_k + .. + f_L))

    A loop that sends no second half before the last first half (DeAR) is slower if the link has time to spare in
    backward. With equal layers and ``Tb >= Tf`` this bound is ``T*``: the norm costs nothing.

    Args:
        first_share: ``a_i / comm_seconds[i]``. With all-reduces, and with a shard on each worker, each direction of a NIC
            carries both halves, and they are equally long. Replies of separate servers travel in the other direction than
            pushes, and can have arrived when the last push has. Then the share is 1, and nothing is faster than :func:`wfbp`.
            With a share of 0 the bound is ``T*``.

    Raises:
        ValueError: the sequences differ in length, a time is negative, or the share is not from 0 to 1.
    """
    _check(forward_seconds, backward_seconds, comm_seconds)
    # A layer without parameters does not wait for the norm.
    partitions = [(layer, seconds) for layer, seconds in enumerate(comm_seconds) if seconds]
    return partitioned_bound(forward_seconds, backward_seconds, partitions, first_share=first_share)


def first_share(clips: bool, servers: bool) -> float:
    """The ``first_share`` of :func:`clipped_bound` with equal shards, on separate servers or on each worker."""
    return 0.0 if not clips else 1.0 if servers else 0.5


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


def partitioned_bound(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    partitions: Sequence[tuple[int, float]],
    overhead_seconds: float = 0.0,
    first_share: float = 0.0,
) -> float:
    """``T*(c')``: the least time over all schedules of a given cut whose partitions have an overhead on the link.

    ``c'_i = c_i + messages_i * overhead``. A partition of several layers is sent when the gradient of its front-most layer
    exists, and that layer's forward waits for it. The bound therefore includes the cost of merging.

    Args:
        partitions: front-most layer and communication seconds of each partition, in forward order.
        overhead_seconds: additional time for which each partition occupies the network resource.
        first_share: the share of each partition that must have arrived before any update; see :func:`clipped_bound`.

    Raises:
        ValueError: the sequences differ in length, a time is negative, a layer is not there, or the share is not from 0 to 1.
    """
    _check(forward_seconds, backward_seconds, [0.0] * len(forward_seconds))
    _check_partitions(len(forward_seconds), partitions, overhead_seconds)
    if not 0 <= first_share <= 1:
        raise ValueError(f"a share is from 0 to 1, not {first_share}")
    ready, tail = _suffix_sums(backward_seconds), _suffix_sums(forward_seconds)
    sent = list(accumulate(seconds + overhead_seconds for _, seconds in partitions))
    summed = [ready[front] + first_share * c for (front, _), c in zip(partitions, sent)]
    latest_summed = list(accumulate(reversed(summed), max))[::-1]  # the maximum over this partition and those behind it
    paths = (m + (1 - first_share) * c + tail[front] for (front, _), c, m in zip(partitions, sent, latest_summed))
    return max([sum(forward_seconds) + sum(backward_seconds), *paths])


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
