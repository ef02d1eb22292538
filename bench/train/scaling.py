"""From a real model to one that a small machine can emulate, ratios kept. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commsched.simulator.profile import Profile

#: Gradients of an EMULATED model where no size is asked for: enough for many partitions, little enough for many steps.
DEFAULT_MEGABYTES = 48.0


@dataclass(frozen=True)
class Scaling:
    """By what the bytes and the seconds of ``real`` were multiplied to get ``profile``."""

    real: Profile
    profile: Profile
    bytes_scale: float
    seconds_scale: float

    def stands_for(self, bandwidth_bytes_per_second: float) -> dict[str, Any]:
        """The cluster that is emulated: the same ratio of communication to computation, with the real model.

        Of the real link ``B'`` it is known that ``bytes / B'`` is to the real times as the emulated bytes by the emulated link
        are to the emulated times, so ``B' = B * seconds_scale / bytes_scale``.
        """
        return {
            "gradient_bytes": self.real.nbytes,
            "compute_seconds": self.real.compute_seconds,
            "bandwidth_bps": 8 * bandwidth_bytes_per_second * self.seconds_scale / self.bytes_scale,
        }


def scale(real: Profile, megabytes: float | None, rho: float, link_bytes_per_second: float, factor: float) -> Scaling:
    """``real`` with ``megabytes`` of gradients, and ``rho`` times as long in communication as in computation.

    Args:
        megabytes: None: ``uniform`` as it is, any other model :data:`DEFAULT_MEGABYTES`.
        link_bytes_per_second: nominal, of the slowest link.
        factor: bytes on the busiest link per byte of gradient (``lower_bound.bytes_factor``).
    """
    if megabytes is None:
        megabytes = real.nbytes / 1e6 if real.model == "uniform" else DEFAULT_MEGABYTES
    bytes_scale = 1e6 * megabytes / real.nbytes
    resized = real.scaled(nbytes=bytes_scale)
    seconds_scale = factor * resized.nbytes / link_bytes_per_second / rho / real.compute_seconds
    return Scaling(real, resized.scaled(seconds=seconds_scale), bytes_scale, seconds_scale)
