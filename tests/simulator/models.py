"""Small models in whole numbers: one element of float32 takes one second on a NIC of ``RATE``."""

from hypothesis import strategies as st

from commsched.simulator.profile import ITEMSIZE, LayerProfile, Profile

RATE = float(ITEMSIZE)


def model(rows):
    """A profile from rows of forward seconds, backward seconds and elements."""
    layers = (LayerProfile(f"layer{i}", ((size,),) if size else (), f, b) for i, (f, b, size) in enumerate(rows))
    return Profile("model", tuple(layers), "made up")


def times(profile, seconds_per_element=1.0):
    """Forward, backward and communication seconds."""
    layers = profile.layers
    comm = [layer.nbytes / ITEMSIZE * seconds_per_element for layer in layers]
    return [layer.forward_seconds for layer in layers], [layer.backward_seconds for layer in layers], comm


def models(least_elements=0, max_layers=8):
    row = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(least_elements, 20))
    return st.lists(row, min_size=1, max_size=max_layers).map(model)
