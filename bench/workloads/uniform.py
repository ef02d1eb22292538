"""``uniform``: 24 equal layers of 3 MB, with backward twice as long as forward. The closed forms are exact for it."""

from __future__ import annotations

from commsched.simulator.profile import LayerProfile, Profile

_LAYERS = 24
_ELEMENTS = 750_000


def make_profile() -> Profile:
    layer_seconds = 1.0 / (3 * _LAYERS)  # one second a step
    layers = (LayerProfile(f"layer{i}", ((_ELEMENTS,),), layer_seconds, 2 * layer_seconds) for i in range(_LAYERS))
    return Profile("uniform", tuple(layers), "equal layers by definition")
