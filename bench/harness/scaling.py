"""Scaling of a real model to one that a small machine can emulate, with the same ratios. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commsched.simulator.profile import Profile

#: Default size of the gradients of an EMULATED model: large enough for many partitions, small enough for many steps.
DEFAULT_MEGABYTES = 48.0


@dataclass(frozen=True)
class Scaling:
    """The factors by which the bytes and the seconds of ``real`` were multiplied to get ``profile``."""

    real: Profile
    profile: Profile
    bytes_scale: float
    seconds_scale: float

    def stands_for(self, bandwidth_bytes_per_second: float) -> dict[str, Any]:
        """The emulated cluster: it has the real model and the same ratio of communication to computation.

        The ratio of ``bytes / B'`` to the real times, with the real link ``B'``, equals the ratio of the emulated bytes over
        the emulated link to the emulated times. Hence ``B' = B * seconds_scale / bytes_scale``.
        """
        return {
            "gradient_bytes": self.real.nbytes,
            "compute_seconds": self.real.compute_seconds,
            "bandwidth_bps": 8 * bandwidth_bytes_per_second * self.seconds_scale / self.bytes_scale,
        }


def scale(real: Profile, megabytes: float | None, rho: float, link_bytes_per_second: float, factor: float) -> Scaling:
    """``real`` scaled to ``megabytes`` of gradients, with ``rho`` times as much communication time as computation time.

    Args:
        megabytes: size of the gradients; None means unscaled for ``uniform``, :data:`DEFAULT_MEGABYTES` for any other model.
        link_bytes_per_second: nominal rate of the slowest link.
        factor: bytes on the busiest link per byte of gradient (``commsched.simulator.scenario.bytes_factor``).
    """
    if megabytes is None:
        megabytes = real.nbytes / 1e6 if real.model == "uniform" else DEFAULT_MEGABYTES
    bytes_scale = 1e6 * megabytes / real.nbytes
    resized = real.scaled(nbytes=bytes_scale)
    seconds_scale = factor * resized.nbytes / link_bytes_per_second / rho / real.compute_seconds
    return Scaling(real, resized.scaled(seconds=seconds_scale), bytes_scale, seconds_scale)
