"""Training steps in virtual time: the library's own Scheduler and ``cut``, on a network whose connections share the NICs.

The simulation is event-driven, pure and deterministic: equal arguments give equal results, and nothing waits in real time. A
step lasts from the start of backward to the end of the next forward.
"""

from .network_sharing import FairShareCache
from .scenario import Cluster, Exchange, Rules, WorkerClass, equal_workers
from .simulate import Outcome, simulate

__all__ = ["Cluster", "Exchange", "Outcome", "Rules", "FairShareCache", "WorkerClass", "equal_workers", "simulate"]
