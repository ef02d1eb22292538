"""``uniform``: 24 equal layers of 3 MB, backward twice forward. Easy to reason about: the closed forms are exact for it."""

from __future__ import annotations

from commsched.simulator.profile import Layer, Profile

_LAYERS = 24
_ELEMENTS = 750_000


def make_profile() -> Profile:
    layer_seconds = 1.0 / (3 * _LAYERS)  # one second a step
    layers = (Layer(f"layer{i}", ((_ELEMENTS,),), layer_seconds, 2 * layer_seconds) for i in range(_LAYERS))
    return Profile("uniform", tuple(layers), "equal layers by definition")
