from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ConfigError
from commsched.core.policies import policy_names
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.space import MAX_RATIO, MAX_TUNED_PARTITION_BYTES, MIN_TUNED_PARTITION_BYTES, Space, max_ratio

CONFIGS = st.builds(
    SchedulerConfig,
    partition_bytes=st.integers(1, 256 * 2**20),
    credit_bytes=st.integers(1, 10**11),
    policy=st.sampled_from(policy_names()),
    fusion_bytes=st.none() | st.integers(1, 10**8),
)
SPACES = st.builds(
    Space,
    incumbent=CONFIGS,
    total_bytes=st.integers(1, 10**12),
    fixed=st.frozensets(st.sampled_from(["partition", "credit", "policy"])),
    policies=st.lists(st.sampled_from(policy_names()), max_size=4).map(tuple),
    least_ratio=st.sampled_from([1, 1, 4, 12]),
)


@st.composite
def spaces_with_points(draw: st.DrawFn) -> tuple[Space, tuple[float, ...]]:
    space = draw(SPACES)
    return space, tuple(draw(st.floats(0, 1)) for _ in range(space.dimensions))


def assert_legal(space: Space, config: SchedulerConfig) -> None:
    incumbent = space.incumbent
    assert isinstance(config.partition_bytes, int)
    assert isinstance(config.credit_bytes, int)
    assert config.fusion_bytes == incumbent.fusion_bytes
    if "partition" in space.fixed:
        assert config.partition_bytes == incumbent.partition_bytes
    else:
        most = min(MAX_TUNED_PARTITION_BYTES, max(space.total_bytes, MIN_TUNED_PARTITION_BYTES))
        assert MIN_TUNED_PARTITION_BYTES <= config.partition_bytes <= most
    if "credit" in space.fixed:
        assert config.credit_bytes == incumbent.credit_bytes
    else:
        assert config.partition_bytes <= config.credit_bytes <= MAX_RATIO * config.partition_bytes
        assert config.credit_bytes <= max(space.total_bytes, config.partition_bytes)
    if "policy" in space.fixed or not space.policies:
        assert config.policy == incumbent.policy
    else:
        assert config.policy in space.policies


def test_no_credit_is_below_the_least_number_of_partitions() -> None:
    space = Space(SchedulerConfig(1_000_000, 4_000_000), 100_000_000, least_ratio=8)
    assert {config.credit_bytes // config.partition_bytes >= 8 for config in space.lattice(2)} == {True}
    assert space.clip(SchedulerConfig(2_000_000, 2_000_000)).credit_bytes == 16_000_000
    assert space.clip(space.incumbent) == space.incumbent


@given(spaces_with_points())
def test_every_point_is_a_legal_configuration_with_a_point_of_its_own(drawn: tuple[Space, tuple[float, ...]]) -> None:
    space, point = drawn
    config = space.from_point(point)
    assert_legal(space, config)
    again = space.to_point(config)
    assert len(again) == space.dimensions
    assert all(0 <= x <= 1 for x in again)
    assert space.from_point(again) == config


@given(SPACES, CONFIGS)
def test_clipping_makes_any_configuration_legal_and_changes_no_legal_one(space: Space, config: SchedulerConfig) -> None:
    clipped = space.clip(config)
    if config != space.incumbent:
        assert_legal(space, clipped)
    assert space.clip(clipped) == clipped
    assert space.from_point(space.to_point(clipped)) in (clipped, space.from_point(space.to_point(space.incumbent)))


@given(SPACES)
def test_the_incumbent_is_a_legal_answer_wherever_it_lies(space: Space) -> None:
    assert space.clip(space.incumbent) == space.incumbent
    assert all(0 <= x <= 1 for x in space.to_point(space.incumbent))


@given(SPACES, st.sampled_from([1, 2]))
def test_the_lattice_is_legal_has_nothing_twice_and_is_never_empty(space: Space, per_octave: int) -> None:
    lattice = space.lattice(per_octave)
    assert lattice
    assert len(set(lattice)) == len(lattice) <= 250 * len(space.choices)
    for config in lattice:
        assert_legal(space, config)
    assert lattice[0].policy == space.choices[0]
    assert {config.policy for config in lattice} == set(space.choices)
    if space.dimensions == 0:
        assert len(lattice) == 1


@given(SPACES)
def test_the_coarse_lattice_is_part_of_the_fine_one(space: Space) -> None:
    assert set(space.lattice(1)) <= set(space.lattice(2))


def test_the_lattice_of_the_default_configuration() -> None:
    incumbent = SchedulerConfig(4_000_000, 16_000_000)
    lattice = Space(incumbent, 10**10).lattice()
    assert incumbent in lattice
    assert sorted({config.partition_bytes for config in lattice}) == [125_000 * 2**octave for octave in range(9)]
    assert [c.credit_bytes // c.partition_bytes for c in lattice if c.partition_bytes == 4_000_000] == [1, 2, 4, 8, 16, 32]
    fine = Space(incumbent, 10**10).lattice(per_octave=2)
    assert [c.credit_bytes / 4_000_000 for c in fine if c.partition_bytes == 4_000_000] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert {2_000_000, 3_000_000, 4_000_000, 6_000_000} <= {config.partition_bytes for config in fine}


def test_points_are_logarithms_of_the_partition_and_of_credit_over_partition() -> None:
    space = Space(SchedulerConfig(), 10**10)
    middle = space.from_point((0.5, 0.5))
    assert middle.partition_bytes == round(math.sqrt(MIN_TUNED_PARTITION_BYTES * MAX_TUNED_PARTITION_BYTES))
    assert middle.credit_bytes / middle.partition_bytes == pytest.approx(math.sqrt(MAX_RATIO))
    assert space.to_point(SchedulerConfig(1, 1)) == (0.0, 0.0)
    assert space.to_point(SchedulerConfig(4_000_000, 1)) == space.to_point(SchedulerConfig(4_000_000, 4_000_000))


def test_no_partition_and_no_credit_is_larger_than_the_model() -> None:
    lattice = Space(SchedulerConfig(), 3_000_000).lattice(2)
    assert max(config.partition_bytes for config in lattice) == 3_000_000
    assert max(config.credit_bytes for config in lattice) == 3_000_000


def test_what_is_fixed_takes_no_coordinate() -> None:
    incumbent = SchedulerConfig(2_000_000, 5_000_000)
    assert Space(incumbent, 10**9).dimensions == 2
    assert Space(incumbent, 10**9, frozenset({"credit"})).dimensions == 1
    assert Space(incumbent, 10**9, frozenset({"partition"})).from_point((0.0,)) == SchedulerConfig(2_000_000, 2_000_000)
    assert Space(incumbent, 10**9, frozenset({"partition", "credit"}), ("priority", "fifo")).dimensions == 1
    assert Space(incumbent, 10**9, frozenset({"partition", "credit", "policy"}), ("priority", "fifo")).dimensions == 0
    assert Space(incumbent, 1000).dimensions == 0


def test_a_size_with_less_than_an_octave_between_its_bounds_is_not_free() -> None:
    policies = frozenset({"policy"})
    for total_bytes, dimensions in ((127_000, 0), (128_000, 2), (64_000, 0)):
        assert Space(SchedulerConfig(), total_bytes, policies).dimensions == dimensions
    small = Space(SchedulerConfig(100_000, 110_000), 127_000)
    assert small.lattice(2) == [SchedulerConfig(100_000, 110_000)]
    assert small.clip(SchedulerConfig(64_000, 64_000)) == SchedulerConfig(100_000, 110_000)
    assert Space(SchedulerConfig(4_000_000), 7_000_000, frozenset({"partition"})).dimensions == 0


@pytest.mark.parametrize(
    ("total_bytes", "credits"),
    [
        (16_000_032, [4, 8, 12, 16]),  # 32 bytes more are no other credit
        (17_500_000, [4, 8, 12, 16]),
        (18_000_000, [4, 8, 12, 16, 18]),
        (16_000_000, [4, 8, 12, 16]),
    ],
)
def test_the_lattice_has_no_two_credits_that_are_hardly_different(total_bytes: int, credits: list[int]) -> None:
    lattice = Space(SchedulerConfig(), total_bytes).lattice(2)
    assert [config.credit_bytes / 1e6 for config in lattice if config.partition_bytes == 4_000_000] == credits


def test_policies_have_places_of_their_own_even_that_of_an_incumbent_which_was_not_asked_for() -> None:
    space = Space(SchedulerConfig(policy="priority"), 10**9, policies=("fifo", "priority", "fifo"))
    assert space.choices == ("priority", "fifo")
    assert space.policy_dimension == 2
    assert [space.from_point((0.5, 0.5, x)).policy for x in (0.0, 0.4, 0.6, 1.0)] == ["priority", "priority", "fifo", "fifo"]

    outside = Space(SchedulerConfig(policy="priority"), 10**9, policies=("fifo",))
    assert outside.to_point(outside.incumbent)[2] != outside.to_point(SchedulerConfig(policy="fifo"))[2]
    assert {outside.from_point((0.5, 0.5, x)).policy for x in (0.0, 0.3, 0.7, 1.0)} == {"fifo"}
    assert Space(SchedulerConfig(), 10**9).policy_dimension is None


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"fixed=\['window'\]: there are credit, partition, policy"):
        Space(SchedulerConfig(), 10**9, frozenset({"window"}))
    with pytest.raises(ValueError, match="total_bytes=0: there is nothing to send"):
        Space(SchedulerConfig(), 0)
    with pytest.raises(ConfigError, match="policy 'lifo' is unknown; there are: fifo, "):
        Space(SchedulerConfig(), 10**9, policies=("lifo",))
    space = Space(SchedulerConfig(), 10**9)
    with pytest.raises(ValueError, match=r"point \(0.5,\): there must be 2 coordinates of 0 to 1"):
        space.from_point((0.5,))
    with pytest.raises(ValueError, match="there must be 2 coordinates of 0 to 1"):
        space.from_point((0.5, 1.5))
    with pytest.raises(ValueError, match="per_octave=3: 1 or 2"):
        space.lattice(3)


def test_credit_reaches_two_partitions_for_each_of_many_shards() -> None:
    assert [max_ratio(workers) for workers in (2, 16, 17, 64)] == [32, 32, 64, 128]
    assert (max_ratio(64, 2), max_ratio(2, 8), max_ratio(64, ordered=True)) == (32, 64, 32)
    space = Space(SchedulerConfig(4_000_000, 16_000_000), 10**10, largest_ratio=max_ratio(64))
    assert space.clip(SchedulerConfig(1_000_000, 10**9)).credit_bytes == 128_000_000
    assert space.to_point(SchedulerConfig(1_000_000, 128_000_000))[1] == 1.0
    ratios = [c.credit_bytes / c.partition_bytes for c in space.lattice() if c.partition_bytes == 4_000_000]
    assert ratios == [1, 2, 4, 8, 16, 32, 64, 128]
