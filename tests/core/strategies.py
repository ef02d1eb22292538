"""Hypothesis strategies that several tests of core share."""

from hypothesis import strategies as st

from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def manifests(draw: st.DrawFn, max_tensors: int = 12) -> Manifest:
    """Small tensors of all dtypes, some without elements."""
    forms = draw(st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZE))), max_size=max_tensors))
    return Manifest(tuple(TensorSpec(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(forms)))
