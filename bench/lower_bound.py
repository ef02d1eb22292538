"""How fast one training iteration can be on a given network, and what the usual orders of sending take. Pure.

The model: backward starts at time 0 and goes from the last layer to the first; layer ``h``'s gradient exists when
``backward_seconds[h:]`` have passed; one network resource averages it in ``comm_seconds[h]``; the next forward goes from
the first layer to the last, and each layer waits for its own average. Compute is serial, partitions are infinitely small
and cost nothing by themselves.

In every function index 0 is the layer at the input side, the three sequences have one item per layer, and times are
seconds. ``comm_seconds[h]`` is ``bytes_factor(...) * bytes of layer h / bytes per second of a NIC``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
    _check(forward_seconds, backward_seconds, comm_seconds)
    ready = _suffix_sums(backward_seconds)
    tail = _suffix_sums(forward_seconds)
    sent = list(accumulate(comm_seconds))
    compute = sum(forward_seconds) + sum(backward_seconds)
    return max([compute, *(r + c + q for r, c, q in zip(ready, sent, tail))])


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


def serial(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """No overlap: all of backward, then all of the communication, then all of forward.

    Raises:
        ValueError: the sequences differ in length, or a time is negative.
    """
    _check(forward_seconds, backward_seconds, comm_seconds)
    return sum(backward_seconds) + sum(comm_seconds) + sum(forward_seconds)


def bytes_factor(workers: int, servers: int = 0) -> float:
    """Bytes that the busiest NIC carries in each direction per byte of gradient, full duplex, load spread evenly.

    ``servers=0``: every worker hosts a shard of the parameter server, ``2 (n - 1) / n``, as in a ring all-reduce. ``k``
    servers on machines of their own: ``max(1, n / k)`` (Y. Jiang et al., "BytePS", OSDI 2020, section 2).

    Raises:
        ValueError: ``workers`` is less than 1, or ``servers`` less than 0.
    """
    if workers < 1 or servers < 0:
        raise ValueError(f"a job has at least 1 worker and 0 servers, not {workers} and {servers}")
    if servers == 0:
        return 2 * (workers - 1) / workers
    return max(1.0, workers / servers)


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


def _check(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> None:
    lengths = len(forward_seconds), len(backward_seconds), len(comm_seconds)
    if len(set(lengths)) != 1:
        raise ValueError(f"forward, backward and communication have {lengths[0]}, {lengths[1]} and {lengths[2]} layers")
    if any(seconds < 0 for times in (forward_seconds, backward_seconds, comm_seconds) for seconds in times):
        raise ValueError("a time is negative")
