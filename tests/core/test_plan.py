from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.plan import Partition, Plan, cut
from tests.core.strategies import manifests

sizes = st.integers(1, 300)


def tensors(*forms: tuple[int, str]) -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{index}", (numel,), dtype) for index, (numel, dtype) in enumerate(forms)))


def borders(plan: Plan) -> list[tuple[str, int, int, tuple[int, ...]]]:
    return [(p.dtype, p.start, p.stop, p.tensors) for p in plan.partitions]


def span(manifest: Manifest, tensor: int) -> tuple[int, int]:
    return manifest.offset(tensor), manifest.offset(tensor) + manifest.tensors[tensor].nbytes


@given(manifests(), sizes)
def test_every_byte_of_every_buffer_is_in_one_partition(manifest: Manifest, partition_bytes: int) -> None:
    ends = dict.fromkeys(manifest.buffer_bytes, 0)
    for partition in cut(manifest, partition_bytes).partitions:
        assert partition.start == ends[partition.dtype] < partition.stop
        ends[partition.dtype] = partition.stop
    assert ends == manifest.buffer_bytes


@given(manifests(), sizes)
def test_no_partition_is_larger_than_asked_or_than_one_element(manifest: Manifest, partition_bytes: int) -> None:
    for partition in cut(manifest, partition_bytes).partitions:
        assert partition.nbytes <= max(partition_bytes, ITEMSIZE[partition.dtype])
        assert partition.nbytes % ITEMSIZE[partition.dtype] == 0


@given(manifests(), sizes)
def test_a_partition_names_exactly_the_tensors_it_has_elements_of(manifest: Manifest, partition_bytes: int) -> None:
    plan = cut(manifest, partition_bytes)
    for partition in plan.partitions:
        inside = [
            tensor
            for tensor, spec in enumerate(manifest.tensors)
            if spec.dtype == partition.dtype
            and max(span(manifest, tensor)[0], partition.start) < min(span(manifest, tensor)[1], partition.stop)
        ]
        assert partition.tensors == tuple(inside)
    for tensor, owners in enumerate(plan.by_tensor):
        assert owners == tuple(p.index for p in plan.partitions if tensor in p.tensors)


@given(manifests(), sizes)
def test_partitions_are_in_forward_order_and_numbered(manifest: Manifest, partition_bytes: int) -> None:
    partitions = cut(manifest, partition_bytes).partitions
    assert [p.index for p in partitions] == list(range(len(partitions)))
    for before, after in pairwise(partitions):
        assert before.tensors[-1] <= after.tensors[0]


@given(manifests(), sizes)
def test_tensors_behind_the_first_in_a_partition_are_whole_and_of_its_dtype(manifest: Manifest, partition_bytes: int) -> None:
    for partition in cut(manifest, partition_bytes).partitions:
        assert {manifest.tensors[tensor].dtype for tensor in partition.tensors} == {partition.dtype}
        if len(partition.tensors) > 1:
            start, stop = span(manifest, partition.tensors[0])
            assert start <= partition.start < stop
            assert partition.stop == span(manifest, partition.tensors[-1])[1]


@given(manifests(), sizes)
def test_large_tensors_are_split_into_the_fewest_near_equal_pieces(manifest: Manifest, partition_bytes: int) -> None:
    plan = cut(manifest, partition_bytes)
    for tensor, (spec, owners) in enumerate(zip(manifest.tensors, plan.by_tensor)):
        if spec.nbytes <= partition_bytes:
            assert len(owners) == (1 if spec.nbytes else 0)
            continue
        most = max(1, partition_bytes // ITEMSIZE[spec.dtype])
        stop = span(manifest, tensor)[1]
        partitions = [plan.partitions[index] for index in owners]
        pieces = [(min(stop, each.stop) - each.start) // ITEMSIZE[spec.dtype] for each in partitions]
        assert len(pieces) == -(-spec.numel // most)
        assert max(pieces) - min(pieces) <= 1
        assert all(each.tensors == (tensor,) for each in partitions[:-1])
        assert partitions[-1].tensors[0] == tensor


@given(manifests(), sizes, st.integers(2, 9))
def test_pieces_of_a_tensor_are_a_multiple_of_the_servers_if_that_is_hardly_more(
    manifest: Manifest, partition_bytes: int, servers: int
) -> None:
    plan, fewest = cut(manifest, partition_bytes, servers=servers), cut(manifest, partition_bytes)
    for spec, owners, least in zip(manifest.tensors, plan.by_tensor, fewest.by_tensor):
        multiple = -(-len(least) // servers) * servers
        if len(least) <= servers or 3 * multiple > 4 * len(least):
            assert len(owners) == len(least)
        else:
            assert len(owners) == min(multiple, spec.numel)
    for each in plan.partitions:
        assert each.nbytes <= max(partition_bytes, ITEMSIZE[each.dtype])


@given(st.integers(1, 500), st.integers(1, 99), st.integers(2, 9))
def test_servers_have_equal_shares_of_a_tensor_in_a_multiple_of_pieces(share: int, partition: int, servers: int) -> None:
    plan = cut(tensors((servers * share, "uint8")), partition, servers=servers)
    assume(len(plan.partitions) > servers and len(plan.partitions) % servers == 0)
    loads = dict.fromkeys(range(servers), 0)
    for each in plan.partitions:
        loads[each.server] += each.nbytes
    assert max(loads.values()) - min(loads.values()) <= len(plan.partitions) // servers  # pieces differ by one byte


@given(manifests(), sizes)
def test_merging_is_greedy(manifest: Manifest, partition_bytes: int) -> None:
    """No partition could have taken the next tensor that has elements as well."""
    plan = cut(manifest, partition_bytes)

    def whole(partition: Partition) -> bool:
        return all(len(plan.by_tensor[tensor]) == 1 for tensor in partition.tensors)

    for before, after in pairwise(plan.partitions):
        if whole(before) and whole(after) and before.dtype == after.dtype:
            assert before.nbytes + manifest.tensors[after.tensors[0]].nbytes > partition_bytes


@given(manifests(), sizes, sizes)
def test_neighbours_are_merged_up_to_fusion_bytes_only(manifest: Manifest, partition_bytes: int, fusion_bytes: int) -> None:
    plan = cut(manifest, partition_bytes, fusion_bytes)
    for partition in plan.partitions:
        assert len(partition.tensors) == 1 or partition.nbytes <= min(fusion_bytes, partition_bytes)
    alone = cut(manifest, partition_bytes, 1)  # splitting large tensors does not depend on fusion
    split = [p for p in plan.partitions if len(plan.by_tensor[p.tensors[0]]) > 1]
    assert [(p.start, p.stop) for p in split] == [
        (p.start, p.stop) for p in alone.partitions if len(alone.by_tensor[p.tensors[0]]) > 1
    ]


def test_fusion_never_exceeds_the_partition() -> None:
    assert borders(cut(tensors((1, "float32"), (1, "float32")), 4, 8)) == [("float32", 0, 4, (0,)), ("float32", 4, 8, (1,))]


@pytest.mark.parametrize(("partition_bytes", "fused_bytes"), [(1_000_000, 250_000), (100_000, 64_000), (40_000, 40_000)])
def test_by_default_neighbours_are_merged_up_to_a_quarter_of_the_partition(partition_bytes: int, fused_bytes: int) -> None:
    manifest = tensors(*((250, "float32") for _ in range(1000)))
    assert {p.nbytes for p in cut(manifest, partition_bytes).partitions[:-1]} == {fused_bytes}


def test_without_fusion_every_tensor_travels_alone() -> None:
    manifest = tensors((1, "float32"), (2, "float32"), (9, "float32"))
    assert borders(cut(manifest, 1000, 1)) == [
        ("float32", 0, 4, (0,)),
        ("float32", 4, 12, (1,)),
        ("float32", 12, 48, (2,)),
    ]


@given(manifests(), sizes)
def test_equal_arguments_give_equal_plans(manifest: Manifest, partition_bytes: int) -> None:
    again = Manifest.from_record(manifest.to_record())
    assert cut(manifest, partition_bytes) == cut(again, partition_bytes)
    assert cut(manifest, partition_bytes).fingerprint == cut(again, partition_bytes).fingerprint


def test_splits_and_merges_by_hand() -> None:
    manifest = tensors((2, "float32"), (3, "float32"), (11, "float32"), (1, "float32"))
    assert borders(cut(manifest, 20)) == [
        ("float32", 0, 20, (0, 1)),
        ("float32", 20, 32, (2,)),
        ("float32", 32, 48, (2,)),
        ("float32", 48, 68, (2, 3)),
    ]


KB = 250  # elements of float32


def test_what_weighs_less_than_a_message_goes_with_the_tensor_in_front() -> None:
    """A layer's bias and the norm behind it go with the weight, whole or split; a partition never becomes larger for it."""
    layers = tensors(*((kilobytes * KB, "float32") for kilobytes in (90, 3, 1, 1, 150, 3, 99, 2)))
    assert [p.tensors for p in cut(layers, 100_000).partitions] == [(0, 1, 2, 3), (4,), (4, 5), (6,), (7,)]


def test_tensors_that_weigh_more_than_a_message_together_do_not_wait_for_the_tensor_in_front() -> None:
    assert [p.tensors for p in cut(tensors(*[(80 * KB, "float32"), *[(5 * KB, "float32")] * 5]), 100_000).partitions] == [
        (0, 1, 2, 3),
        (4, 5),
    ]
    together, apart = (tensors((80 * KB, "float32"), (KB, "float32"), (numel, "float32")) for numel in (15 * KB, 15 * KB + 1))
    assert [p.tensors for p in cut(together, 100_000).partitions] == [(0, 1, 2)]
    assert [p.tensors for p in cut(apart, 100_000).partitions] == [(0, 1), (2,)]


def test_a_tensor_does_not_wait_for_a_small_one_in_front_of_it() -> None:
    """Backward makes the one in front later, maybe much later."""
    assert [p.tensors for p in cut(tensors((KB, "float32"), (80 * KB, "float32")), 100_000).partitions] == [(0,), (1,)]


@pytest.mark.parametrize("fusion_bytes", [1, 64_000])
def test_fusion_that_was_set_holds_for_the_smallest_tensors_too(fusion_bytes: int) -> None:
    manifest = tensors((80 * KB, "float32"), (KB, "float32"), (150 * KB, "float32"), (KB, "float32"))
    assert [p.tensors for p in cut(manifest, 100_000, fusion_bytes).partitions] == [(0,), (1,), (2,), (2,), (3,)]


def test_another_dtype_between_two_tensors_keeps_them_apart() -> None:
    manifest = tensors((1, "float32"), (1, "float64"), (1, "float32"))
    assert borders(cut(manifest, 1000)) == [("float32", 0, 4, (0,)), ("float64", 0, 8, (1,)), ("float32", 4, 8, (2,))]


def test_a_tensor_without_elements_is_in_no_partition_and_separates_nothing() -> None:
    manifest = tensors((1, "float32"), (0, "float64"), (0, "float32"), (1, "float32"))
    plan = cut(manifest, 1000)
    assert borders(plan) == [("float32", 0, 8, (0, 3))]
    assert plan.by_tensor == ((0,), (), (), (0,))


def test_nothing_but_tensors_without_elements_gives_no_partition() -> None:
    assert cut(tensors((0, "float32")), 1).partitions == ()
    assert cut(Manifest(()), 1).partitions == ()


def test_an_element_larger_than_a_partition_is_a_partition() -> None:
    assert borders(cut(tensors((2, "float64")), 3)) == [("float64", 0, 8, (0,)), ("float64", 8, 16, (0,))]


def test_the_fingerprint_tells_plans_apart() -> None:
    manifest = tensors((8, "float32"))
    prints = {cut(manifest, 8).fingerprint, cut(manifest, 16).fingerprint, cut(tensors((8, "float64")), 16).fingerprint}
    assert len(prints) == 3


def test_tensors_that_share_no_partition() -> None:
    """However small; large ones are split as ever."""
    packed = tensors((1, "float32"), (2, "float32"), (60, "float32"), (1, "float32"))
    alone = Manifest(packed.tensors, shares_partitions=False)
    assert [p.tensors for p in cut(packed, 100).partitions] == [(0, 1), (2,), (2,), (2, 3)]
    assert [p.tensors for p in cut(alone, 100).partitions] == [(0,), (1,), (2,), (2,), (2,), (3,)]
