"""The ladder of grace periods: how long each part of a failing job waits for the part that knows more. Seconds.

When a rank dies, many ranks see a consequence of it, and each part that sees one waits for the cause before it acts. The
periods must grow in the order in which the parts act, and ``tests/core/test_timeouts.py`` checks that they do.
"""

from __future__ import annotations

#: A process that ends because another has failed waits this long before it ends. Launchers take the process that ends first
#: for the cause of all (torchrun: "Root Cause (first observed failure)"), and the failed process may need a moment to end.
CONSEQUENCE_SECONDS = 1.0

#: A member of the control channel waits this long for rank 0 to decide which failure was the first.
VERDICT_SECONDS = 2.0

#: Rank 0's control server waits this long at its close until all members have heard how the job ended; a frozen member never
#: does.
FAREWELL_SECONDS = 2.0

#: A backend's failure is reported this late. A rank that dies breaks connections of ranks that then break others', and the
#: control channel, which knows who was first, may hear of it a moment after the backend.
BACKEND_FAILURE_SECONDS = 2.0

#: A thread that waits in a library for lost ranks has this long to return by itself before the process ends.
STUCK_LIBRARY_SECONDS = 2.0

#: A rank that fails under MPI gives the others this long to report the cause before it aborts them all.
MPI_ABORT_SECONDS = 2.0

#: An engine's call that failed waits this long for the job's verdict, to raise the cause instead of a consequence. It is
#: longer than the control channel takes to decide, with or without rank 0.
RAISE_SECONDS = 3.0

#: A launcher terminates the other processes this long after the first failure: they may end by themselves and name its cause.
LAUNCHER_SECONDS = 5.0

#: A launcher that gets SIGTERM passes it on and gives the processes this long: they may make the step in hand to its end, and
#: save a checkpoint. It is less than the 30 s after which Kubernetes and Slurm kill the launcher, too. After a second signal
#: they have ``LAUNCHER_SECONDS``.
SIGTERM_SECONDS = 25.0
