"""One training step in virtual time: the library's own Scheduler and cut, on a network of NICs that connections share.

Event-driven, pure and deterministic: equal arguments give equal results, and nothing waits. Steps go from one backward's
start to the next forward's end.
"""

from .scenario import Cluster, Exchange, Rules, WorkerClass, equal_workers
from .shares import Shares
from .simulate import Outcome, simulate

__all__ = ["Cluster", "Exchange", "Outcome", "Rules", "Shares", "WorkerClass", "equal_workers", "simulate"]
