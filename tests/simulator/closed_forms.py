"""The times of the usual orders of sending, and the greatest of priority order, by formulas: the simulator must give the same.

Arguments are as in ``commsched/simulator/lower_bound.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commsched.simulator.lower_bound import partitioned_bound


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
    """
    ready = suffix_sums(backward_seconds)
    ended = sum(backward_seconds)  # the forward waits for backward, even if nothing is sent
    link = 0.0
    for front, seconds in buckets:
        link = max(link, ready[front]) + overhead_seconds + seconds
    return max(ended, link) + sum(forward_seconds)


def dear(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """DeAR: reduce-scatter in backward order; after all of it, all-gather in forward order. Each takes half the time.

    ``max_h(r_h + RS_1 + .. + RS_h) + max_h(AG_1 + .. + AG_h + q_h)`` (L. Zhang et al., "DeAR", ICDCS 2023, without fusion).
    """
    sent = [seconds / 2 for seconds in accumulate(comm_seconds)]
    ready, tail = suffix_sums(backward_seconds), suffix_sums(forward_seconds)
    scattered = max((r + c for r, c in zip(ready, sent)), default=0.0)
    return scattered + max((c + q for c, q in zip(sent, tail)), default=0.0)


def serial(forward_seconds: Sequence[float], backward_seconds: Sequence[float], comm_seconds: Sequence[float]) -> float:
    """No overlap: all of backward, then all communication, then all of forward."""
    return sum(backward_seconds) + sum(comm_seconds) + sum(forward_seconds)


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
    """
    best = partitioned_bound(forward_seconds, backward_seconds, partitions, overhead_seconds)
    if not partitions:
        return best
    window = max(window_seconds, *(seconds for _, seconds in partitions))
    smallest_first = accumulate(sorted(seconds for _, seconds in partitions))
    messages = max(1, sum(total <= window * (1 + 1e-12) for total in smallest_first))
    return best + window + messages * overhead_seconds


def suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]
