from commsched.core.scheduler import SchedulerConfig
from commsched.simulator.profile import Grouping, LayerProfile, Profile, fill_buckets
from commsched.simulator.scenario import Rules

PROFILE = Profile(
    "two",
    (LayerProfile("a", ((2, 3), (3,)), 1, 1), LayerProfile("norm", (), 1, 1), LayerProfile("b", ((4,), (1,)), 1, 1)),
    "made up",
)


def sizes(plan):
    return [(partition.nbytes, partition.tensors) for partition in plan.partitions]


def test_tensors_are_in_forward_order_and_know_their_layer():
    assert [(spec.name, spec.nbytes) for spec in PROFILE.manifest.tensors] == [("a", 24), ("a.1", 12), ("b", 16), ("b.1", 4)]
    assert Grouping.of(PROFILE, Rules(SchedulerConfig(28, 28, "priority", 1))).layers_of == ((0,), (0,), (2,), (2,))


def test_a_partition_is_of_all_its_layers():
    grouping = Grouping.of(PROFILE, Rules(SchedulerConfig(28, 28)))
    assert sizes(grouping.plan) == [(24, (0,)), (28, (1, 2)), (4, (3,))]
    assert grouping.layers_of == ((0,), (0, 2), (2,))
    assert [grouping.label(index) for index in range(3)] == ["a", "a.1 + 1", "b.1"]


def test_fusion_is_the_librarys():
    grouping = Grouping.of(PROFILE, Rules(SchedulerConfig(28, 28, "priority", 1)))
    assert [nbytes for nbytes, _ in sizes(grouping.plan)] == [24, 12, 16, 4]


def test_buckets_are_closed_when_they_hold_the_limit():
    """From the last tensor on: 4 and 16 bytes are at least 20; 12 and 24 are more than 20, but uncut."""
    manifest = PROFILE.manifest
    assert sizes(fill_buckets(manifest, 20)) == [(36, (0, 1)), (20, (2, 3))]
    assert sizes(fill_buckets(manifest, 20, 1)) == [(24, (0,)), (28, (1, 2)), (4, (3,))]
    assert sizes(fill_buckets(manifest, 1000)) == [(56, (0, 1, 2, 3))]
    assert sizes(fill_buckets(manifest, 1)) == [(24, (0,)), (12, (1,)), (16, (2,)), (4, (3,))]
