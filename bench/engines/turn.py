"""What one system of an engine is given to train, and what it gives back: between ``compare`` and the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commsched.simulator.profile import Profile

if TYPE_CHECKING:
    from commsched.session import Session


@dataclass(frozen=True)
class Turn:
    """One training of ``steps`` steps.

    ``profile`` has the layers, whose times are to be slept and whose shapes are the gradients' (float32). ``hosts`` are the
    addresses at which ranks reach each other, by rank. A session is there for every system: those that do not average by it may
    ``gather`` with it, to agree on ports, say.
    """

    session: Session
    profile: Profile
    steps: int
    hosts: Sequence[str]


@dataclass(frozen=True)
class Trained:
    """``ended[i]`` is when step ``i`` was over on this rank, in seconds of ``time.monotonic``: its loss is known.

    ``weights`` are a few numbers, in float64, that any wrong or stale weight would change: every layer's mean, in the order of
    the profile.
    """

    ended: Sequence[float]
    weights: Sequence[float]


#: A system of an engine.
Train = Callable[[Turn], Trained]
