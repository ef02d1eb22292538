"""Partition and credit that choose themselves."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ClosedError
from commsched.core.interfaces import Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.session.session import Session
from commsched.settings import Settings
from commsched.simulator.profile import Profile
from commsched.simulator.scenario import bytes_factor
from commsched.tuner.auto import AutoChoice, Chosen, best_sizes, partition_count
from commsched.tuner.initial_guesses import before_first_step
from commsched.tuner.learn import FirstSizes, JobFacts, NothingMeasured, TuningContext, most_seconds_per_byte
from commsched.tuner.link import LOOPBACK_RATE
from commsched.tuner.profiler import Busy, LinkEstimate, Measured
from commsched.tuner.result import describe_config
from commsched.tuner.space import MAX_RATIO, Space
from commsched.tuner.trials import Stopped
from tests.session.test_session import Ordered

from .test_meter import manifest
from .training import UNTIL_ENDED, WIDE, Training, choosing, require_same_weights

MODEL = manifest(25_000_000)
BEGIN = SchedulerConfig(4_000_000, 16_000_000)


def bowl(partition: float, ratio: float) -> Callable[[SchedulerConfig], float]:
    """Step times with one least, at a partition of so many bytes and a credit of so many partitions."""

    def seconds(config: SchedulerConfig) -> float:
        off = math.log2(config.partition_bytes / partition), math.log2(config.credit_bytes / config.partition_bytes / ratio)
        return 1 + 0.1 * off[0] ** 2 + 0.1 * off[1] ** 2

    return seconds


# --- the search among predictions ---


@given(partition=st.integers(64_000, 32_000_000), ratio=st.floats(1, MAX_RATIO), start=st.integers(64_000, 32_000_000))
def test_the_least_of_a_smooth_surface_is_found_within_half_an_octave(partition: int, ratio: float, start: int) -> None:
    space = Space(BEGIN, MODEL.nbytes)
    most = min(ratio, max(1.0, MODEL.nbytes / partition))
    found = best_sizes(bowl(partition, most), space, [SchedulerConfig(start, 2 * start)])
    assert abs(math.log2(found.partition_bytes / partition)) < 0.6
    assert abs(math.log2(found.credit_bytes / found.partition_bytes / most)) < 0.6


def test_of_equal_times_the_largest_partition_is_taken() -> None:
    asked: list[int] = []

    def flat_up_to_1_mb(config: SchedulerConfig) -> float:
        asked.append(config.partition_bytes)
        return 1.0 if config.partition_bytes <= 1_000_000 else 2.0

    start = SchedulerConfig(500_000, 2_000_000)
    found = best_sizes(flat_up_to_1_mb, Space(BEGIN, MODEL.nbytes), [start])
    assert found.partition_bytes == max(size for size in asked if size <= 1_000_000)
    assert found.partition_bytes == 1_000_000


@pytest.mark.parametrize(("ordered", "partition"), [(False, 1_000_000), (True, 500_000)])
def test_less_counts_as_equal_over_collectives(ordered: bool, partition: int) -> None:
    def seconds(config: SchedulerConfig) -> float:
        return 1.003 if config.partition_bytes == 1_000_000 else 1.0 if config.partition_bytes == 500_000 else 2.0

    start = SchedulerConfig(500_000, 2_000_000)
    assert best_sizes(seconds, Space(BEGIN, MODEL.nbytes), [start], ordered).partition_bytes == partition


def test_what_cannot_be_predicted_is_not_chosen() -> None:
    def seconds(config: SchedulerConfig) -> float:
        return math.nan if config.partition_bytes > 1_000_000 else 1e6 / config.partition_bytes

    found = best_sizes(seconds, Space(BEGIN, MODEL.nbytes), [SchedulerConfig(250_000, 1_000_000)])
    assert found.partition_bytes <= 1_000_000


TENSORS_OF_3_MB = Manifest(tuple(TensorSpec(f"{n}.weight", (750_000,), "float32") for n in range(24)))


def fast_near(start: int) -> Callable[[SchedulerConfig], float]:
    """Step times that are equal up to 1.3 times a size, and longer beyond."""
    return lambda config: 1.0 if start <= config.partition_bytes < 1.3 * start else 2.0


@pytest.mark.parametrize(
    ("start", "least", "most"),
    [(346_000, 375_000, 390_000), (376_000, 376_000, 376_000), (300_000, 300_000, 300_000)],
)
def test_partitions_grow_a_little_where_tensors_then_fill_them_better(start: int, least: int, most: int) -> None:
    """A tensor of 3 MB has 12 pieces on 4 shards with less than 375 KB, and 8 with more. 300 KB would grow by a fourth."""
    count = partition_count(TENSORS_OF_3_MB, 4)
    assert [count(300_000), count(346_000), count(376_000)] == [288, 288, 192]
    space = Space(BEGIN, TENSORS_OF_3_MB.nbytes)
    found = best_sizes(fast_near(start), space, [SchedulerConfig(start, 8 * start)], count=count)
    assert least <= found.partition_bytes <= most
    assert found.credit_bytes // found.partition_bytes == 8


@pytest.mark.parametrize("credit", [2 * 346_000, 360_000])
def test_partitions_do_not_grow_where_fewer_would_fit_into_the_credit(credit: int) -> None:
    begin = SchedulerConfig(346_000, credit)
    space = Space(begin, TENSORS_OF_3_MB.nbytes, frozenset({"credit"}))
    assert best_sizes(fast_near(346_000), space, [begin], count=partition_count(TENSORS_OF_3_MB, 4)) == begin


@pytest.mark.parametrize(("start", "times"), [(376_000, 1), (346_000, 50)])
def test_partitions_are_not_counted_where_tensors_fill_them_or_there_are_very_many(start: int, times: int) -> None:
    asked: list[int] = []

    def count(partition_bytes: int) -> int:
        asked.append(partition_bytes)
        return times * partition_count(TENSORS_OF_3_MB, 4)(partition_bytes)

    begin = SchedulerConfig(start, 8 * start)
    assert best_sizes(fast_near(start), Space(BEGIN, TENSORS_OF_3_MB.nbytes), [begin], count=count) == begin
    assert set(asked) == {start}


def test_sizes_that_lie_outside_the_bounds_do_not_grow_beyond_the_factor() -> None:
    small = SchedulerConfig(32_000, 256_000)
    space = Space(small, TENSORS_OF_3_MB.nbytes)
    found = best_sizes(fast_near(32_000), space, [small], count=partition_count(TENSORS_OF_3_MB, 4))
    assert found == small


def test_partitions_do_not_grow_to_a_size_that_is_predicted_to_be_slower() -> None:
    def seconds(config: SchedulerConfig) -> float:
        return 1.0 if config.partition_bytes == 346_000 else 1.01

    start = SchedulerConfig(346_000, 2_800_000)
    space = Space(BEGIN, TENSORS_OF_3_MB.nbytes)
    assert best_sizes(seconds, space, [start], count=partition_count(TENSORS_OF_3_MB, 4)) == start


@pytest.mark.parametrize("fixed", ["partition", "credit"])
def test_what_is_fixed_stays(fixed: str) -> None:
    space = Space(BEGIN, MODEL.nbytes, frozenset({fixed}))
    count = partition_count(MODEL, 4)
    found = best_sizes(bowl(200_000, 2), space, [BEGIN, SchedulerConfig(100_000, 200_000)], count=count)
    assert getattr(found, f"{fixed}_bytes") == getattr(BEGIN, f"{fixed}_bytes")
    assert found != BEGIN


# --- rounds ---


class Model:
    """Predicts by ``truth`` times an error that shrinks with each measured configuration."""

    link = LinkEstimate(1e-8, 1e-4)

    def __init__(self, job: Job, known: int) -> None:
        self._job = job
        self._known = known

    def predict(self, config: SchedulerConfig) -> float:
        return self._job.predicted[min(self._known, len(self._job.predicted)) - 1](config)

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
        assert dict(trials) == {config: self._job.truth(config) for config, _ in trials}
        return Model(self._job, len(trials))


class Job:
    """Stands for training: its step times are ``truth``, and what the model predicts after ``n`` measurements is
    ``predicted[n - 1]``."""

    def __init__(
        self,
        truth: Callable[[SchedulerConfig], float],
        *predicted: Callable[[SchedulerConfig], float],
        ends_after: int = 99,
        error: Exception | None = None,
        settings: Settings = Settings(),  # noqa: B008 - it is frozen
        workers: int = 2,
        servers: int = 0,
        freezes: bool = False,
        may_freeze: bool = True,
        repeats: bool = True,
        shards: int = 1,
        agreed_after: int = 0,
    ) -> None:
        self.truth = truth
        self.predicted = predicted
        self.current = BEGIN
        self.used: list[SchedulerConfig] = []
        self.lines: list[str] = []
        self._left = ends_after
        self._error = error
        self._waited = 0  # steps since the configuration changed
        self._agreed_after, self.applied = agreed_after, BEGIN
        self.may_freeze = may_freeze
        me, where = _any(self), (2, "made up", freezes, "127.0.0.1", 1, workers, servers)
        facts = JobFacts(*where, freezes=freezes, shards=shards)
        self.sizes = AutoChoice(
            TuningContext(
                settings,
                facts,
                me,
                me,
                me,
                lambda: self.current,
                self.lines.append,
                lambda group: self.may_freeze,
                lambda group: repeats and self.current.order == "static" and self._waited >= 10,
            )
        )

    def run(self, model: Manifest = MODEL) -> Chosen | None:
        return self.sizes.run(0, model)

    # the learner's part
    def profile(self, group: int, manifest: Manifest) -> Measured | None:
        self._left -= 1
        if self._left < 0:
            return None
        return Measured(Profile("made up", (), "here"), Model.link, (self.truth(self.current),) * 5)

    def guesses(self, measured: Measured, policy: str) -> list[SchedulerConfig]:
        return [SchedulerConfig(1_000_000, 4_000_000)]

    def open_model(self, measured: Measured, incumbent: SchedulerConfig, stack: ExitStack) -> Model:
        if self._error is not None:
            raise self._error
        return Model(self, 1)

    def stop(self) -> None: ...

    # the meter's and the trials' part
    def wait_for_steps(self, group: int, steps: int) -> bool:
        self._waited += steps
        if self._waited >= self._agreed_after and self.current != self.applied:
            self.current, self._waited = self.applied, 0
        return self._left > 0

    def settle_steps(self, config: SchedulerConfig) -> int:
        return 10 if config.order == "static" else 3

    def apply(self, config: SchedulerConfig) -> None:
        self._waited = 0
        self.used.append(config)
        self.applied = config
        if self._agreed_after == 0:
            self.current = config


def _any(value: Any) -> Any:
    return value


def test_a_good_model_needs_one_change() -> None:
    job = Job(bowl(500_000, 4), bowl(500_000, 4))
    chosen = job.run()
    assert chosen is not None
    assert chosen.finished
    assert job.used == [chosen.kept] == [job.current]
    assert job.truth(chosen.kept) < 1.03
    [line] = job.lines
    assert "chosen: steps of" in line
    assert "with partition 4.0 MB, credit 16.0 MB" in line
    assert "100 MB/s" in line


def test_sizes_are_measured_only_when_all_ranks_use_them() -> None:
    """A rank that is late agrees on a change late: here the steps before that are more than those that settle."""
    late, prompt = Job(*[bowl(500_000, 4)] * 4, agreed_after=20), Job(*[bowl(500_000, 4)] * 4)
    for job in (late, prompt):
        first = job.run()
        assert job.current == first.kept != BEGIN
        job.apply(BEGIN)  # as when other tensors are trained, just before the next choice
        assert job.run() == first
    assert late.used == prompt.used
    assert late.lines == prompt.lines


def test_measurements_correct_a_model_that_was_wrong() -> None:
    job = Job(bowl(500_000, 4), bowl(8_000_000, 4), bowl(500_000, 4))
    chosen = job.run()
    assert chosen is not None
    assert len(job.used) == 2
    assert job.truth(chosen.kept) < 1.03


class Uncalibrated(Model):
    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
        raise AssertionError("the step times have no part in it")


class OrderedJob(Job):
    """Collectives: ``link`` says how long they keep the network busy. ``opened`` has the link of each model."""

    link = LinkEstimate(3e-8, 2e-3)

    def __init__(self, truth: Callable[[SchedulerConfig], float], *predicted: Callable[[SchedulerConfig], float]) -> None:
        super().__init__(truth, *predicted)
        self.opened: list[LinkEstimate] = []

    def profile(self, group: int, manifest: Manifest) -> Measured | None:
        profile = super().profile(group, manifest)
        count = -(-MODEL.nbytes // self.current.partition_bytes)
        seconds = self.link.seconds_per_byte * MODEL.nbytes + self.link.partition_seconds * count
        return profile and replace(profile, busy=Busy(seconds, MODEL.nbytes, count))

    def open_model(self, measured: Measured, incumbent: SchedulerConfig, stack: ExitStack) -> Model:
        self.opened.append(measured.link)
        return Uncalibrated(self, 1)


def test_over_collectives_the_times_of_the_network_correct_the_model() -> None:
    job = OrderedJob(bowl(500_000, 4), bowl(500_000, 4))
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept == job.used[0]
    first, second = job.opened
    assert first == Model.link
    assert second.partition_seconds == pytest.approx(2e-3, rel=0.2)
    assert second.seconds_per_byte == pytest.approx(3e-8, rel=0.2)


def test_what_turns_out_slower_is_given_up() -> None:
    job = Job(bowl(4_000_000, 4), bowl(64_000, 1))
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept == job.current == BEGIN
    assert len(job.used) > 1


def test_a_gain_too_small_to_matter_changes_nothing() -> None:
    job = Job(bowl(4_000_000, 4), lambda config: 1.0 - 0.004 * (config.partition_bytes == 1_000_000))
    chosen = job.run()
    assert chosen == Chosen(BEGIN, BEGIN, "chosen")
    assert job.used == [SchedulerConfig(16_000_000, 64_000_000), BEGIN]  # the first showed no gain


def test_what_partitions_cost_is_seen_although_steps_with_one_size_do_not_tell() -> None:
    """The model takes the cost for that of bytes, so no sizes seem better, until it has seen larger partitions."""

    def truth(config: SchedulerConfig) -> float:
        return 1 + 2e-3 * MODEL.nbytes / config.partition_bytes + config.credit_bytes / 100e6

    small = SchedulerConfig(125_000, 500_000)

    def blind(config: SchedulerConfig) -> float:
        return truth(small) + 0.26e-6 * abs(config.partition_bytes - small.partition_bytes)

    job = Job(truth, blind, truth)
    job.current = small
    chosen = job.run()
    assert chosen is not None
    assert job.used[0] == SchedulerConfig(500_000, 2_000_000)
    assert truth(chosen.kept) < 1.02 * min(
        truth(SchedulerConfig(125_000 * factor, 125_000 * factor)) for factor in range(1, 40)
    )


def test_after_a_trial_sizes_must_be_better_than_the_fastest_and_not_than_those_on_trial() -> None:
    def seconds(config: SchedulerConfig) -> float:
        octaves = math.log2(config.partition_bytes / BEGIN.partition_bytes)
        return 1.0 if 0 <= octaves <= 0.5 else 1.02 ** abs(octaves)

    job = Job(seconds, seconds)
    assert job.run() == Chosen(BEGIN, BEGIN, "chosen")
    assert [each.partition_bytes for each in job.used] == [16_000_000, 4_000_000]


@pytest.mark.parametrize(("begin", "used"), [(346_000, [377_316]), (300_000, [])])
def test_as_fast_sizes_are_worth_a_change_if_they_need_far_fewer_partitions(begin: int, used: list[int]) -> None:
    """A tensor of 3 MB has 8 pieces instead of 12 then."""
    job = Job(lambda config: 1.0, fast_near(begin), fast_near(begin), shards=4)
    job.current = SchedulerConfig(begin, 8 * begin)
    chosen = job.run(TENSORS_OF_3_MB)
    assert [each.partition_bytes for each in job.used] == used
    assert chosen is not None
    assert chosen.kept.partition_bytes == (used or [begin])[0]


def test_larger_partitions_are_measured_though_the_model_has_found_better_ones_already() -> None:
    """They are faster, which the model does not know."""

    def least_at_250_kb(config: SchedulerConfig) -> float:
        return 1 + 0.02 * abs(math.log2(config.partition_bytes / 250_000))

    job = Job(lambda config: 1e6 / config.partition_bytes, least_at_250_kb)
    job.current = SchedulerConfig(64_000, 256_000)
    chosen = job.run()
    assert chosen is not None
    assert 200_000 < job.used[0].partition_bytes < 300_000
    assert job.used[1].partition_bytes == 4 * job.used[0].partition_bytes
    assert chosen.kept.partition_bytes >= job.used[1].partition_bytes


def test_sizes_nearer_to_larger_ones_that_were_slower_than_to_the_fastest_are_not_tried() -> None:
    """The model would have all sizes alike."""
    job = Job(lambda config: 1.0 if config.partition_bytes <= 700_000 else 1.1, lambda config: 1.0)
    job.current = SchedulerConfig(100_000, 400_000)
    chosen = job.run()
    assert chosen is not None
    assert [each.partition_bytes for each in job.used[:2]] == [1_000_000, 200_000]
    assert all(each.partition_bytes <= math.sqrt(200_000 * 1_000_000) for each in job.used[1:])
    assert chosen.kept == job.current == job.used[-1]
    assert chosen.kept.partition_bytes >= 200_000


def test_the_limit_of_the_search_is_kept_whatever_is_predicted_beyond_it() -> None:
    def larger_is_faster(config: SchedulerConfig) -> float:
        return 1e6 / config.partition_bytes

    starts = [SchedulerConfig(250_000, 1_000_000), SchedulerConfig(4_000_000, 4_000_000)]
    assert best_sizes(larger_is_faster, Space(BEGIN, MODEL.nbytes), starts, most_bytes=600_000).partition_bytes == 500_000


@pytest.mark.parametrize(("slower", "varies", "tries"), [(1.2, 0.0, 0), (1.003, 0.0, 1), (1.02, 0.02, 1), (1.2, 0.02, 0)])
def test_sizes_larger_than_clearly_slower_ones_are_not_measured(slower: float, varies: float, tries: int) -> None:
    """The job begins with twice the size that the model finds at once."""

    class VaryingJob(Job):
        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            found = super().profile(group, manifest)
            return found and replace(
                found, samples=tuple(found.step_seconds * (1 + varies * part) for part in (-2, -1, 0, 1, 2))
            )

    def half_is_best(config: SchedulerConfig) -> float:
        return 1.0 if config.partition_bytes == 2_000_000 else 1.01 if config.partition_bytes > 2_000_000 else 1.5

    job = VaryingJob(lambda config: 1.0 if config.partition_bytes == 2_000_000 else slower, half_is_best)
    job.run()
    assert job.used[0].partition_bytes == 2_000_000
    assert len([each for each in job.used if each.partition_bytes == 8_000_000]) == tries


class Unmoved(Model):
    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
        return self


class LuckyJob(Job):
    """Steps with 250 KB are as long as those with 500 KB in the first profile, and 1.5 % longer from then on. With other sizes
    they are clearly longer. Steps vary by ``spread``."""

    spread = 0.005

    def __init__(self, ends_after: int = 99) -> None:
        self.taken: list[int] = []  # the partition of each profile
        super().__init__(
            lambda config: {250_000: 1.015, 500_000: 1.0}.get(config.partition_bytes, 2.0),
            lambda config: {250_000: 1.0, 500_000: 1.0, 1_000_000: 1.04}.get(config.partition_bytes, 2.0),
            ends_after=ends_after,
        )
        self.current = SchedulerConfig(250_000, 1_000_000)
        self.most_profiles = 99  # after so many, nothing more can be measured

    def open_model(self, measured: Measured, incumbent: SchedulerConfig, stack: ExitStack) -> Model:
        return Unmoved(self, 1)

    def profile(self, group: int, manifest: Manifest) -> Measured | None:
        if len(self.taken) >= self.most_profiles:
            raise NothingMeasured("5 steps were observed, none of them complete")
        found = super().profile(group, manifest)
        size = self.current.partition_bytes
        middle = 0.999 if size == 250_000 and size not in self.taken else self.truth(self.current)
        self.taken.append(size)
        return found and replace(found, samples=tuple(middle + self.spread * part for part in (-2, -1, 0, 1, 2)))


def test_sizes_of_which_the_faster_is_not_clear_are_measured_again_in_turn() -> None:
    job = LuckyJob()
    chosen = job.run()
    assert chosen is not None
    assert job.taken[:5] == [250_000, 500_000, 1_000_000, 250_000, 500_000]
    assert job.taken.count(1_000_000) == 1
    assert all(job.taken.count(size) <= 3 for size in job.taken)
    assert chosen.kept.partition_bytes == job.current.partition_bytes == 500_000


def test_sizes_are_not_measured_without_end_where_steps_vary_much() -> None:
    class WildJob(LuckyJob):
        spread = 0.1

    job = WildJob()
    job.run()
    assert {job.taken.count(size) for size in job.taken} == {3}


@pytest.mark.parametrize("first", [3, 4])
def test_what_was_measured_in_turn_suffices_if_nothing_more_can_be(first: int) -> None:
    job = LuckyJob()
    job.most_profiles = first
    chosen = job.run()
    assert chosen is not None
    assert chosen.finished
    assert len(job.taken) == first


def test_sizes_of_which_the_faster_is_clear_are_measured_once() -> None:
    class ExactJob(LuckyJob):
        spread = 0.0001

    job = ExactJob()
    job.run()
    assert all(job.taken.count(size) == 1 for size in job.taken)


def test_training_that_ends_while_sizes_are_measured_in_turn_is_over() -> None:
    whole = LuckyJob()
    whole.run()
    for after in range(len(whole.taken)):
        chosen = LuckyJob(ends_after=after).run()
        assert chosen is not None
        assert chosen.reason == "unfinished"


def test_what_was_measured_suffices_if_nothing_more_can_be() -> None:
    class OnceJob(Job):
        taken = 0

        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            self.taken += 1
            if self.taken > 1:
                raise NothingMeasured("5 steps were observed, none of them complete")
            found = super().profile(group, manifest)
            return found and replace(found, samples=(0.8, 0.9, 1.0, 1.1, 1.2))

    job = OnceJob(lambda config: 1.0, lambda config: 1.0 if config == BEGIN else 2.0)
    assert job.run() == Chosen(BEGIN, BEGIN, "chosen")
    assert job.taken == 2
    assert job.lines


def test_a_single_complete_step_says_nothing_about_how_much_steps_vary() -> None:
    class ShortJob(Job):
        taken = 0

        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            self.taken += 1
            found = super().profile(group, manifest)
            return found and replace(found, samples=found.samples[:1])

    job = ShortJob(lambda config: 1.0, lambda config: 1.0 if config == BEGIN else 2.0)
    job.run()
    assert job.taken == 3


@pytest.mark.parametrize(("slower", "kept"), [(0.002, 16_000_000), (0.004, 4_000_000)])
def test_of_sizes_that_are_equally_fast_the_larger_are_kept(slower: float, kept: int) -> None:
    job = Job(lambda config: 1.0 + slower * (config != BEGIN), lambda config: 1.0 + 0.01 * (config != BEGIN))
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept.partition_bytes == job.current.partition_bytes == kept


def test_the_line_has_all_that_was_measured() -> None:
    job = Job(bowl(500_000, 4), bowl(8_000_000, 4), bowl(500_000, 4))
    job.run()
    [line] = job.lines
    assert re.search(
        r"steps of 10\d\d ms \(with partition 4.0 MB, credit 16.0 MB: \d+ ms; partition \S+ MB, credit .* ms\); ", line
    )


@pytest.mark.parametrize(("spread", "profiles"), [(0.01, 1), (0.015, 2), (0.02, 3), (0.05, 3)])
def test_step_times_that_vary_are_measured_again(spread: float, profiles: int) -> None:
    """The median's standard error is 0.83, 0.59 and 0.48 of the spread with five, ten and fifteen steps."""

    class VaryingJob(Job):
        taken = 0

        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            self.taken += 1
            found = super().profile(group, manifest)
            assert found is not None
            middle = found.step_seconds
            return replace(found, samples=tuple(middle * (1 + spread * part) for part in (-2, -1, 0, 1, 2)))

    job = VaryingJob(lambda config: 1.0 + (config != BEGIN), lambda config: 1.0 if config == BEGIN else 2.0)
    assert job.run() == Chosen(BEGIN, BEGIN, "chosen")
    assert job.used == []
    assert job.taken == profiles
    profile = job.sizes.profiled(0)
    assert profile is not None
    assert len(profile.samples) == 5 * profiles


def test_training_that_ends_while_step_times_are_measured_again_is_over() -> None:
    class EndsJob(Job):
        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            found = super().profile(group, manifest)
            return found and replace(found, samples=(0.8, 0.9, 1.0, 1.1, 1.2))

    for after in (0, 1, 2):
        chosen = EndsJob(all_alike, all_alike, ends_after=after).run()
        assert chosen is not None
        assert chosen.reason == "unfinished"


class LaterJob(Job):
    """A change of sizes takes effect as training goes on, and not at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, agreed_after=1, **options)


def test_sizes_on_trial_are_given_up_if_their_steps_cannot_be_judged(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Model):
        def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
            raise RuntimeError("the model's process has ended")

    class FailingJob(LaterJob):
        def open_model(self, measured: Measured, incumbent: SchedulerConfig, stack: ExitStack) -> Model:
            return Fails(self, 1)

    job = FailingJob(*[lambda config: 1.0 + 0.01 * (config != BEGIN)] * 2)
    assert job.run() == Chosen(BEGIN, BEGIN, "chosen")
    assert [each.partition_bytes for each in job.used] == [16_000_000, 4_000_000]
    assert "partition and credit stay as they are: RuntimeError: the model's process has ended" in caplog.text


@pytest.mark.parametrize(
    ("slower", "kept", "said"),
    [
        (0.01, BEGIN, "partition and credit stay as they are"),
        (-0.01, SchedulerConfig(9_110_309, 36_441_236), "partition 9.1 MB, credit 36.4 MB from now on"),
    ],
)
def test_after_an_error_the_fastest_sizes_that_were_measured_stay(
    slower: float, kept: SchedulerConfig, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Measurements correct the model, so other sizes are used then, whose steps cannot be judged."""

    class FailingJob(LaterJob):
        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            if len(self.used) == 2:
                raise NothingMeasured("5 steps were observed, none of them complete")
            return super().profile(group, manifest)

    job = FailingJob(lambda config: 1.0 + slower * (config != BEGIN), lambda config: 1.0, bowl(500_000, 4))
    assert job.run() == Chosen(BEGIN, kept, "chosen")
    assert len(job.used) == 3
    assert job.used[-1] == kept
    assert f"{said}: NothingMeasured: 5 steps were observed" in caplog.text


@pytest.mark.parametrize(("costs", "factors"), [(0.02, [4]), (0.03, [2]), (0.06, [])])
def test_larger_partitions_are_measured_only_if_they_hardly_cost_by_the_model(costs: float, factors: list[int]) -> None:
    """Each doubling costs the share ``costs``."""

    def seconds(config: SchedulerConfig) -> float:
        return float((1 + costs) ** abs(math.log2(config.partition_bytes / BEGIN.partition_bytes)))

    job = Job(seconds, seconds)
    chosen = job.run()
    assert chosen == Chosen(BEGIN, BEGIN, "chosen")
    assert [each.partition_bytes // BEGIN.partition_bytes for each in job.used] == [*factors, *([1] if factors else [])]


def small_is_fast(config: SchedulerConfig) -> float:
    return 1 + config.partition_bytes / 4e6 if config.partition_bytes >= 500_000 else 1.2


def all_alike(config: SchedulerConfig) -> float:
    return 1.0 if config.partition_bytes <= BEGIN.partition_bytes else 2.0


def test_with_separate_servers_smaller_partitions_are_measured_as_long_as_they_are_faster() -> None:
    job = Job(small_is_fast, all_alike, servers=2)
    chosen = job.run()
    assert [config.partition_bytes for config in job.used] == [2_000_000, 1_000_000, 500_000, 250_000, 500_000]
    assert {config.credit_bytes // config.partition_bytes for config in job.used} == {4}
    assert chosen == Chosen(BEGIN, SchedulerConfig(500_000, 2_000_000), "chosen")
    assert job.sizes.profiled(0) is not None
    assert job.lines[0].startswith("partition 500 KB, credit 2.0 MB chosen: steps of 1125 ms (with partition 4.0 MB")


def test_halves_begin_with_the_fastest_sizes_and_go_on_past_those_that_were_measured() -> None:
    """Larger ones that are as fast within noise would have a half that is not much faster."""

    def truth(config: SchedulerConfig) -> float:
        return {16_000_000: 1.003, 4_000_000: 1.0, 2_000_000: 0.9, 1_000_000: 0.95}[config.partition_bytes]

    job = Job(
        truth, lambda config: 1.0 if config == BEGIN else 1.04 if config.partition_bytes == 16_000_000 else 2.0, servers=2
    )
    chosen = job.run()
    assert [config.partition_bytes for config in job.used] == [16_000_000, 2_000_000, 1_000_000, 2_000_000]
    assert chosen == Chosen(BEGIN, SchedulerConfig(2_000_000, 8_000_000), "chosen")


@pytest.mark.parametrize(("gain", "used"), [(0.009, [2_000_000, 4_000_000]), (0.011, [2_000_000, 1_000_000, 2_000_000])])
def test_smaller_partitions_must_be_faster_by_more_than_noise(gain: float, used: list[int]) -> None:
    job = Job(lambda config: 1 - gain * (config.partition_bytes == 2_000_000), all_alike, servers=2)
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept == job.used[-1]
    assert [config.partition_bytes for config in job.used] == used


@pytest.mark.parametrize(("first", "halves"), [(32_000, [16_000]), (31_999, [])])
def test_there_is_a_smallest_partition(first: int, halves: list[int]) -> None:
    def faster_if_smaller(config: SchedulerConfig) -> float:
        return float(config.partition_bytes)

    job = Job(faster_if_smaller, lambda config: 1.0 if config.partition_bytes <= 64_000 else 2.0, servers=2)
    job.current = SchedulerConfig(first, first)
    job.run()
    assert [config.partition_bytes for config in job.used if config.partition_bytes < first] == halves
    assert all(config.credit_bytes >= config.partition_bytes for config in job.used)


def test_smaller_partitions_are_those_that_cut_tensors() -> None:
    """Partitions of 2 MB would be the same as those of 4 MB."""
    layers = Manifest(tuple(TensorSpec(f"layer {index}", (250_000,), "float32") for index in range(25)))
    job = Job(small_is_fast, all_alike, servers=2)
    chosen = job.run(layers)
    assert job.used == [SchedulerConfig(500_000, 2_000_000), SchedulerConfig(250_000, 1_000_000), job.used[0]]
    assert chosen == Chosen(BEGIN, job.used[0], "chosen")


def test_a_later_choice_measures_smaller_partitions_anew() -> None:
    job = Job(small_is_fast, all_alike, servers=2)
    job.run()
    job.truth, job.used = lambda config: float(config.partition_bytes), []
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept.partition_bytes < 32_000


def test_with_shards_on_the_workers_smaller_partitions_are_not_measured() -> None:
    job = Job(small_is_fast, all_alike)
    assert job.run() == Chosen(BEGIN, BEGIN, "chosen")
    assert job.used == []


@pytest.mark.parametrize(("size", "used"), [({"partition": "4MB"}, []), ({"credit": "16MB"}, [2_000_000, 1_000_000])])
def test_smaller_partitions_leave_what_is_set(size: dict[str, str], used: list[int]) -> None:
    job = Job(small_is_fast, all_alike, servers=2, settings=Settings.load({"partition": "auto", "credit": "auto", **size}, {}))
    job.run()
    assert [config.partition_bytes for config in job.used][:2] == used
    assert {config.credit_bytes for config in job.used} == ({16_000_000} if used else set())


def test_training_that_ends_amid_smaller_partitions_is_over() -> None:
    for after in range(1, 5):
        chosen = Job(small_is_fast, all_alike, servers=2, ends_after=after).run()
        assert chosen is not None
        assert chosen.reason == "unfinished"


@pytest.mark.parametrize("after", [0, 1])
def test_tensors_that_are_not_trained_any_more_are_left(after: int) -> None:
    chosen = Job(bowl(500_000, 4), bowl(500_000, 4), ends_after=after).run()
    assert chosen is not None
    assert not chosen.finished
    assert chosen.reason == "unfinished"


def test_without_a_model_training_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(bowl(500_000, 4), error=RuntimeError("the model's process has ended"))
    chosen = job.run()
    assert chosen == Chosen(BEGIN, BEGIN, "chosen")
    assert "partition and credit stay as they are: RuntimeError: the model's process has ended" in caplog.text


@pytest.mark.parametrize("error", [Stopped("rank 1 has left"), ClosedError("this session is closed")])
def test_the_end_of_training_is_no_failure(error: Exception) -> None:
    with pytest.raises(type(error)):
        Job(bowl(500_000, 4), error=error).run()


def test_one_worker_on_the_network_has_nothing_to_choose() -> None:
    assert Job(bowl(500_000, 4), workers=1).run() is None


def test_sizes_that_are_set_are_not_touched() -> None:
    both = Settings.load({"partition": "4MB", "credit": "16MB"}, {})
    assert Job(bowl(500_000, 4), settings=both).run() is None
    one = Settings.load({"credit": "16MB", "partition": "auto"}, {})
    job = Job(bowl(500_000, 4), bowl(500_000, 4), settings=one)
    job.run()
    assert {config.credit_bytes for config in job.used} == {16_000_000}


# --- the order of launches ---


def costs_of_static(seconds: float) -> Callable[[SchedulerConfig], float]:
    """Step times with one least; a static order adds ``seconds``."""
    return lambda config: bowl(500_000, 4)(config) + (seconds if config.order == "static" else 0.0)


@pytest.mark.parametrize(("costs", "kept"), [(-0.01, "static"), (0.004, "static"), (0.006, "agreed"), (0.1, "agreed")])
def test_a_static_order_is_kept_unless_steps_are_slower_with_it(costs: float, kept: str) -> None:
    job = Job(costs_of_static(costs), bowl(500_000, 4), freezes=True)
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept.order == job.current.order == kept
    assert [config.order for config in job.used] == ["agreed"] * (len(job.used) - (1 if kept == "static" else 2)) + (
        ["static"] if kept == "static" else ["static", "agreed"]
    )
    sizes = {(config.partition_bytes, config.credit_bytes) for config in (chosen.kept, job.used[-1], job.used[-2])}
    assert (chosen.kept.partition_bytes, chosen.kept.credit_bytes) in sizes
    [line] = job.lines
    assert line.count("static order") == 1
    assert line.startswith(describe_config(chosen.kept))


def test_of_step_times_that_vary_a_static_order_must_be_clearly_slower() -> None:
    """By more than two standard errors of the difference."""
    for costs, kept in ((0.015, "static"), (0.025, "agreed")):  # the second is too much, however steps vary
        job = Varying(costs_of_static(costs), bowl(500_000, 4), freezes=True)
        chosen = job.run()
        assert chosen is not None
        assert chosen.kept.order == kept


class Varying(Job):
    def profile(self, group: int, manifest: Manifest) -> Measured | None:
        profile = super().profile(group, manifest)
        seconds = self.truth(self.current)
        return profile and replace(profile, samples=tuple(seconds * (1 + 0.03 * each) for each in (-1, -1, 0, 1, 1)))


def test_a_plugin_may_say_that_the_order_stays_agreed_while_a_static_one_is_measured() -> None:
    class Late(Job):
        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            self.may_freeze = self.may_freeze and self.current.order != "static"
            return super().profile(group, manifest)

    job = Late(costs_of_static(-0.1), bowl(500_000, 4), freezes=True)
    chosen = job.run()
    assert chosen is not None
    assert [config.order for config in job.used[-2:]] == ["static", "agreed"]
    assert chosen.kept.order == job.current.order == "agreed"


def test_a_later_choice_gives_up_a_static_order_that_is_not_allowed_any_more() -> None:
    for sizes in ({}, {"partition": "4MB", "credit": "16MB"}):
        job = Job(costs_of_static(-0.1), bowl(500_000, 4), settings=Settings.load(sizes, {}), freezes=True)
        job.run()
        assert job.current.order == "static"
        job.may_freeze = False
        job.used.clear()
        again = job.run()
        assert again is not None
        assert {config.order for config in job.used} == {"agreed"}
        assert job.current == again.kept


def test_an_order_that_does_not_repeat_itself_stays_agreed() -> None:
    job = Job(costs_of_static(-0.1), bowl(500_000, 4), freezes=True, repeats=False)
    chosen = job.run()
    assert chosen is not None
    assert [config.order for config in job.used[-2:]] == ["static", "agreed"]
    assert chosen.kept.order == job.current.order == "agreed"
    [line] = job.lines
    assert "static" not in line


def test_an_error_while_a_static_order_is_measured_keeps_the_agreed_one() -> None:
    class Broken(Varying):
        profiles = 0

        def profile(self, group: int, manifest: Manifest) -> Measured | None:
            self.profiles += self.current.order == "static"
            if self.profiles > 1:
                raise RuntimeError("no more")
            return super().profile(group, manifest)

    job = Broken(costs_of_static(-0.1), bowl(500_000, 4), freezes=True)
    chosen = job.run()
    assert job.profiles == 2
    assert chosen is not None
    assert chosen.kept.order == job.current.order == "agreed"


@pytest.mark.parametrize("order", ["agreed", "static"])
def test_an_order_that_is_set_is_not_touched(order: str) -> None:
    job = Job(costs_of_static(-0.1), bowl(500_000, 4), settings=Settings.load({"order": order}, {}), freezes=True)
    job.current = replace(BEGIN, order=order)
    job.run()
    assert len(job.used) > 0
    assert {config.order for config in job.used} == {order}


@pytest.mark.parametrize(("freezes", "may_freeze"), [(False, True), (True, False)])
def test_an_order_stays_agreed_where_it_may_not_be_static(freezes: bool, may_freeze: bool) -> None:
    job = Job(costs_of_static(-0.1), bowl(500_000, 4), freezes=freezes, may_freeze=may_freeze)
    job.run()
    assert {config.order for config in job.used} == {"agreed"}


def test_the_order_is_chosen_also_if_both_sizes_are_set() -> None:
    both = Settings.load({"partition": "4MB", "credit": "16MB"}, {})
    job = Job(costs_of_static(-0.1), error=RuntimeError("no model is needed"), settings=both, freezes=True)
    chosen = job.run()
    static = replace(BEGIN, order="static")
    assert chosen == Chosen(BEGIN, static, "chosen")
    assert job.used == [static]
    assert job.lines == ["a static order chosen: steps of 1800 ms (with an agreed order: 1900 ms)"]


def test_sizes_of_a_tuned_file_stay_and_the_order_is_chosen() -> None:
    tuned = Settings(partition=4_000_000, credit=16_000_000)  # which the user has not given
    assert tuned.given == frozenset()
    job = Job(costs_of_static(-0.1), error=RuntimeError("no model is needed"), settings=tuned, freezes=True)
    chosen = job.run()
    assert chosen == Chosen(BEGIN, replace(BEGIN, order="static"), "chosen")


def test_tensors_too_small_to_say_anything_keep_an_agreed_order() -> None:
    job = Job(costs_of_static(-0.1), freezes=True)
    assert job.run(manifest(1000)) is None


def test_a_later_choice_begins_with_an_agreed_order() -> None:
    job = Job(costs_of_static(-0.01), bowl(500_000, 4), freezes=True)
    first = job.run()
    assert first is not None
    job.used.clear()
    again = job.run()
    assert again is not None
    assert job.used == [replace(first.kept, order="agreed"), *job.used[1:-1], first.kept]
    assert {config.order for config in job.used[:-1]} == {"agreed"}
    assert (again.incumbent, again.kept) == (first.kept, first.kept)


def test_training_that_ends_amid_the_choice_of_the_order_is_over() -> None:
    whole = Job(costs_of_static(0.1), bowl(500_000, 4), freezes=True)
    whole.run()
    for after in range(len(whole.used) + 1):
        chosen = Job(costs_of_static(0.1), bowl(500_000, 4), freezes=True, ends_after=after).run()
        assert chosen is not None
        assert chosen.reason == "unfinished"


# --- in training ---


@pytest.mark.parametrize("wrap", [None, Ordered], ids=["by priority", "in one order"])
@pytest.mark.parametrize("delay_seconds", [0.0, 0.0003])
def test_weights_are_those_of_training_that_chooses_nothing(
    delay_seconds: float, wrap: Callable[[Transport], Transport] | None
) -> None:
    lines: list[str] = []
    was_static: list[bool] = []  # before each step of rank 0
    ended = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        ended.set()

    def note(session: Session, step: int) -> None:
        if session.rank == 0:
            was_static.append(session.core.is_static)

    training = Training(
        world_size=3,
        steps=UNTIL_ENDED,
        width=WIDE,
        config=SchedulerConfig(),
        open_rank=choosing(Settings(), say),
        before_step=note,
        until=ended,
        delay_seconds=delay_seconds,
        wrap_transport=wrap,
    )
    by_rank = training.run()
    plain = Training(world_size=3, steps=training.taken, width=WIDE, config=SchedulerConfig()).run()
    require_same_weights(by_rank, plain[0])
    assert "chosen" in lines[0]
    assert ("static" in lines[0]) == any(was_static) == (wrap is not None)  # on trial at least


def test_the_first_step_has_sizes_made_for_the_tensors() -> None:
    used: dict[int, list[SchedulerConfig]] = {0: [], 1: [], 2: []}

    def note(session: Session, step: int) -> None:
        if step == 0:
            used[session.rank].append(session.core.next_config)

    Training(world_size=3, steps=2, width=400, config=SchedulerConfig(), open_rank=choosing(Settings()), before_step=note).run()
    assert used[0] == used[1] == used[2]
    assert 64_000 <= used[0][0].partition_bytes < 4_000_000


def test_far_fewer_partitions_are_worth_a_change() -> None:
    job = Job(lambda config: 1.0, lambda config: 1.0)
    job.current = SchedulerConfig(64_000, 256_000)
    chosen = job.run()
    assert chosen is not None
    assert chosen.kept.partition_bytes >= 1_000_000


def test_a_second_larger_model_gets_sizes_of_its_own_and_a_smaller_one_none() -> None:
    facts = JobFacts(2, "ps", False, "127.0.0.1", 1, 2)
    choose = FirstSizes(facts, Settings(), SchedulerConfig)
    assert choose(manifest(100)) is None
    small, large = choose(manifest(100_000)), choose(manifest(100_000_000))
    assert small is not None
    assert large is not None
    assert small.partition_bytes < large.partition_bytes
    assert choose(manifest(1_000_000)) is None


def test_processes_of_one_machine_begin_with_few_partitions() -> None:
    """Each one costs processor time that computation lacks there."""
    facts = JobFacts(2, "ps", False, "127.0.0.1", 1, 2)
    free = before_first_step(MODEL.nbytes, 2, rate=LOOPBACK_RATE)[0]
    chosen = FirstSizes(facts, Settings(), SchedulerConfig)(MODEL)
    assert chosen is not None
    assert chosen.partition_bytes > 2 * free


@pytest.mark.parametrize(("cores", "is_short"), [(1, True), (4, True), (5, False), (64, False)])
def test_on_a_machine_with_many_cores_other_cores_do_the_work_of_partitions(cores: int, is_short: bool) -> None:
    facts = JobFacts(2, "ps", False, "127.0.0.1", 1, 2, cores=cores)
    chosen = FirstSizes(facts, Settings(), SchedulerConfig)(MODEL)
    assert chosen is not None
    assert (chosen.partition_bytes > before_first_step(MODEL.nbytes, 2, rate=LOOPBACK_RATE)[0]) == is_short


def test_the_other_size_fits_the_one_that_is_set() -> None:
    facts = JobFacts(2, "ps", False, "127.0.0.1", 1, 2)
    by_partition = FirstSizes(facts, Settings(partition=8_000_000), SchedulerConfig)(MODEL)
    by_credit = FirstSizes(facts, Settings(credit=600_000), SchedulerConfig)(MODEL)
    assert by_partition is not None
    assert by_credit is not None
    assert (by_partition.partition_bytes, by_partition.credit_bytes) == (8_000_000, 32_000_000)
    assert (by_credit.partition_bytes, by_credit.credit_bytes) == (150_000, 600_000)


def test_each_of_several_flows_has_a_partition_from_the_first_step_on() -> None:
    one, four = (JobFacts(2, "ps", False, "127.0.0.1", 1, 2, flows=flows) for flows in (1, 4))
    chosen = [FirstSizes(facts, Settings(), SchedulerConfig)(MODEL) for facts in (one, four)]
    assert [each and each.credit_bytes / each.partition_bytes for each in chosen] == [4, 16]
    assert (one.least_ratio, one.largest_ratio) == (1, 32)
    assert (four.least_ratio, four.largest_ratio) == (4, 128)
    assert JobFacts(8, "ps", False, "10.0.0.1", 8, 8, servers=2, flows=3).least_ratio == 6


def test_a_change_that_somebody_else_makes_stays() -> None:
    job = Job(bowl(500_000, 4), bowl(500_000, 4))
    mine = SchedulerConfig(1_234_567, 5_000_000)
    profile = job.profile

    def interrupted(group: int, described: Manifest) -> Measured | None:
        job.current = mine
        return profile(group, described)

    job.profile = interrupted  # type: ignore[method-assign]
    chosen = job.run()
    assert chosen is not None
    assert chosen.finished
    assert chosen.kept == job.current == mine
    assert job.used == []


def test_steps_in_which_nothing_was_seen_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(bowl(500_000, 4))

    def nothing(group: int, described: Manifest) -> Measured | None:
        raise NothingMeasured("5 steps were observed, none of them complete")

    job.profile = nothing  # type: ignore[method-assign]
    chosen = job.run()
    assert chosen is not None
    assert chosen.finished
    assert "partition and credit stay as they are: NothingMeasured: 5 steps" in caplog.text


def test_another_change_right_behind_the_first_sizes_holds_no_rank_back() -> None:
    """Ranks wait until a change is agreed on. If they waited for that configuration, the next one would hide it for ever."""

    def open_rank(session: Session) -> None:
        def choose(manifest: Manifest) -> SchedulerConfig | None:
            if manifest.nbytes < 1000 or session.rank != 0:
                return None
            session.reconfigure(SchedulerConfig(300, 900))
            threading.Timer(0, session.reconfigure, (SchedulerConfig(500, 900),)).start()
            return SchedulerConfig(400, 900)

        session.choose_first_sizes(choose)

    by_rank = Training(steps=10, open_rank=open_rank).run()
    require_same_weights(by_rank, Training(steps=10).run()[0])


def test_only_loopback_without_a_rate_of_its_own_is_known_to_be_fast() -> None:
    here, elsewhere = (JobFacts(4, "gloo", True, host, 1, 4) for host in ("127.0.0.1", "192.0.2.77"))
    assert most_seconds_per_byte(here, Settings()) == bytes_factor(4) / (LOOPBACK_RATE / 8)  # four ranks share the machine
    assert most_seconds_per_byte(here, Settings(rate=1e6)) == math.inf
    assert most_seconds_per_byte(replace(here, workers=1), Settings()) == math.inf  # ranks of one host, in shared memory
    assert most_seconds_per_byte(elsewhere, Settings()) == math.inf
