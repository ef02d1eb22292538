import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ManifestMismatch, ProtocolError, UnsupportedError
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec, require_equal
from tests.core.strategies import manifests

WEIGHT = TensorSpec("weight", (2, 3), "float32")
BIAS = TensorSpec("bias", (3,), "float32")
HALF = TensorSpec("half", (5,), "float16")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
)
almost_tensors = st.tuples(
    st.text() | json_values,
    st.lists(st.integers(-2, 9) | st.booleans(), max_size=3) | json_values,
    st.sampled_from(sorted(ITEMSIZE)) | json_values,
).map(list)


def mismatch(*ranks: tuple[TensorSpec, ...]) -> str:
    with pytest.raises(ManifestMismatch) as raised:
        require_equal([Manifest(tensors) for tensors in ranks])
    return str(raised.value)


def test_tensors_of_a_dtype_lie_one_after_another() -> None:
    manifest = Manifest((WEIGHT, HALF, BIAS))
    assert [manifest.offset(tensor) for tensor in range(3)] == [0, 0, 24]
    assert manifest.buffer_bytes == {"float32": 36, "float16": 10}
    assert manifest.nbytes == 46


def test_a_scalar_has_one_element() -> None:
    assert TensorSpec("scale", (), "float64").nbytes == 8


def test_an_unsupported_dtype_is_named_with_its_tensor() -> None:
    with pytest.raises(UnsupportedError) as raised:
        TensorSpec("tokens", (3,), "int64")
    said = "tensor 'tokens' has dtype int64; commsched communicates float16, bfloat16, float32, float64, uint8"
    assert str(raised.value) == said


@given(manifests(), manifests())
def test_fingerprints_are_equal_if_and_only_if_the_manifests_are(a: Manifest, b: Manifest) -> None:
    assert (a.fingerprint == b.fingerprint) == (a == b)


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("weight2", (2, 3), "float32"),
        TensorSpec("weight", (3, 2), "float32"),
        TensorSpec("weight", (6,), "float32"),
        TensorSpec("weight", (2, 3), "float64"),
    ],
)
def test_name_shape_and_dtype_count_in_the_fingerprint(other: TensorSpec) -> None:
    assert Manifest((other,)).fingerprint != Manifest((WEIGHT,)).fingerprint


def test_the_order_counts_in_the_fingerprint() -> None:
    assert Manifest((WEIGHT, BIAS)).fingerprint != Manifest((BIAS, WEIGHT)).fingerprint


def test_the_order_does_not_count_in_the_model_s() -> None:
    assert Manifest((WEIGHT, BIAS)).model_fingerprint == Manifest((BIAS, WEIGHT)).model_fingerprint
    assert Manifest((WEIGHT, BIAS)).model_fingerprint != Manifest((WEIGHT,)).model_fingerprint
    assert Manifest((WEIGHT,)).model_fingerprint != Manifest((TensorSpec("weight", (6,), "float32"),)).model_fingerprint


@given(manifests())
def test_a_record_survives_json(manifest: Manifest) -> None:
    assert Manifest.from_record(json.loads(json.dumps(manifest.to_record()))) == manifest


@given(json_values | st.lists(almost_tensors | json_values, max_size=3))
def test_any_json_is_a_manifest_or_a_protocol_error(record: Any) -> None:
    said = None
    try:
        assert Manifest.from_record(record).to_record() == record
    except ProtocolError as error:
        said = str(error)
    assert said is None or said.startswith("not a manifest: ")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "not a manifest: NoneType instead of a list"),
        ({}, "not a manifest: dict instead of a list"),
        ("", "not a manifest: str instead of a list"),
        ([["w", [2]]], "not a manifest: not enough values to unpack (expected 3, got 2)"),
        ([["w", [-1], "float32"]], "not a manifest: tensor 'w' with shape [-1]"),
        ([["w", [True], "float32"]], "not a manifest: tensor 'w' with shape [True]"),
        ([["w", "", "float32"]], "not a manifest: tensor 'w' with shape ''"),
        ([[7, [2], "float32"]], "not a manifest: tensor 7 with shape [2]"),
        ([["w", [2], "int8"]], "not a manifest: tensor 'w' has dtype int8; commsched communicates "),
        ([["w", [2**62 + 1], "uint8"]], "not a manifest: tensor 'w' with over 4611686018427387904 elements or 64 dimensions"),
        ([["w", [1] * 65, "uint8"]], "not a manifest: tensor 'w' with over 4611686018427387904 elements or 64 dimensions"),
        (
            [["w", [10**4000] * 64, "uint8"]],
            "not a manifest: tensor 'w' with over 4611686018427387904 elements or 64 dimensions",
        ),
        ([["w", [2], []]], "not a manifest: unhashable type: 'list'"),
    ],
)
def test_garbage_is_a_protocol_error(record: Any, said: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        Manifest.from_record(record)
    assert str(raised.value).startswith(said)


def test_a_tensor_may_be_large_or_have_no_elements() -> None:
    for shape in ([2**31, 2**31], [2**62], [2**62, 2**62, 0], [1] * 64):
        assert Manifest.from_record([["w", shape, "uint8"]]).to_record() == [["w", shape, "uint8"]]


def test_equal_manifests_are_accepted() -> None:
    require_equal([Manifest((WEIGHT, BIAS))] * 3)


def test_a_mismatch_names_the_tensor_the_rank_and_both_values() -> None:
    transposed = TensorSpec("weight", (3, 2), "float32")
    said = mismatch((WEIGHT, BIAS), (WEIGHT, BIAS), (transposed, BIAS))
    assert said == "tensor 0 is 'weight' float32[2, 3] on rank 0 but 'weight' float32[3, 2] on rank 2"


def test_a_mismatch_in_number_names_what_only_one_rank_has() -> None:
    said = "rank 0 has 2 tensors, rank 1 has 1; the first that only one has is 'bias' float32[3]"
    assert mismatch((WEIGHT, BIAS), (WEIGHT,)) == said
    said = "rank 0 has 1 tensors, rank 1 has 3; the first that only one has is 'bias' float32[3]"
    assert mismatch((WEIGHT,), (WEIGHT, BIAS, HALF)) == said
    said = "rank 0 has 0 tensors, rank 1 has 1; the first that only one has is 'weight' float32[2, 3]"
    assert mismatch((), (WEIGHT,)) == said


def test_every_rank_is_told_the_same() -> None:
    """The message depends on the manifests of all ranks only, not on who checks."""
    ranks = [(WEIGHT,), (BIAS,), (HALF,)]
    assert (
        mismatch(*ranks) == mismatch(*ranks) == "tensor 0 is 'weight' float32[2, 3] on rank 0 but 'bias' float32[3] on rank 1"
    )


@given(manifests(), st.data())
def test_names_in_names_the_tensors_that_bytes_belong_to(manifest: Manifest, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZE)))
    size = manifest.buffer_bytes.get(dtype, 0)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    names = [spec.name for spec in manifest.tensors if spec.dtype == dtype for _ in range(spec.nbytes)]  # one for each byte
    owners = list(dict.fromkeys(names[start:stop]))
    said = manifest.names_in(dtype, start, stop)
    if not owners:
        assert said == "no tensor"
    elif len(owners) == 1:
        assert said == f"'{owners[0]}'"
    else:
        assert said == f"'{owners[0]}' and {len(owners) - 1} more"
