"""Partition and credit that choose themselves: from what is known before the first step, then from a few profiled steps and the
simulator. A few steps are spent on sizes that are not expected to be better: on larger partitions, and with separate servers on
smaller ones. Over collectives the order of launches is chosen last: a static one, unless steps are slower with it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from ..core.errors import error_text
from ..core.manifest import Manifest
from ..core.plan import cut
from ..core.scheduler import SchedulerConfig
from .learn import PROFILE_STEPS, NothingMeasured, TuningContext, is_end
from .meter import standard_error
from .model_process import RemoteModel
from .profiler import LinkEstimate, Measured, fitted_link
from .result import describe_config, milliseconds
from .space import MIN_TELLING_BYTES, Space

log = logging.getLogger("commsched")

#: How often sizes are chosen in a row. Each time, what was measured with the sizes before corrects the model: the step times;
#: over collectives, the times for which they kept the network busy.
ROUNDS = 4

#: A choice whose predicted gain is below this is not worth a change of all plans.
MIN_PREDICTED_GAIN = 0.005

#: Partitions whose number is smaller by this factor are worth a change although the step time is predicted to be equal.
FAR_FEWER = 0.68

#: The partition that was found grows by less than this factor, to the size that tensors fill best. The simulation knows one
#: size per octave, so it does not see this: on 4 shards a tensor of 3 MB has 12 pieces with 0.346 MB, and 8 with 0.375 MB.
MOST_GROWTH = 2.0**0.25

#: The number of sizes within that factor. Their partitions are counted if all together could hold more than so many times the
#: bytes of all tensors, and if there are at most so many of them: a count takes some microseconds for each, in which training
#: may wait for the interpreter's lock, and tensors of many pieces fill their partitions.
_GROWTH_STEPS, WORTH_FILLING, MOST_COUNTED = 8, 1.02, 10_000

#: Sizes whose predicted step times differ by less than this count as equal. The largest partition of them is taken, because
#: it costs the least processor time, which the model does not know.
EQUAL_TIMES = 0.005

#: The same for collectives. Larger ones delay what becomes ready by more than the simulation says: on links, partitions of
#: 0.47 MB took 1 % longer than those of 0.24 MB (8 workers over gloo), where the simulation says 0.2 %.
EQUAL_TIMES_OF_COLLECTIVES = 0.002

#: An agreement on a change is given up after so many steps and seconds. It takes one or two steps, unless a rank is held up.
MOST_STEPS_TO_AGREE, MOST_SECONDS_TO_AGREE = 100, 10.0

#: Steps with one size do not tell what a partition costs from what a byte costs. So if nothing better is found, partitions that
#: are larger than the fastest are measured too, unless partitions as large were measured already: by the first of these factors
#: by which a step is predicted to take longer by at most that share. Where the processors were short, 4 workers on two cores
#: stayed with partitions that made steps 20 % longer.
TELLING_FACTORS, MAX_TELLING_LOSS = (4, 2), 0.05

#: A configuration is clearly slower if its steps are longer by more than this, and by more than so many standard errors of the
#: difference.
CLEAR_DIFFERENCE, CLEAR_ERRORS = 0.005, 2

#: Sizes whose measured step times differ by less than this count as equal, and the largest partition is kept. With 0.5 %, two
#: workers once kept partitions of 1.26 MB instead of 0.28 MB, which were 4 % slower in the steps after that. With 0.2 %, four
#: workers once kept 0.245 MB instead of 0.49 MB, which takes more processor time.
EQUAL_SIZES = 0.003

#: A static order takes a fifth less processor time. It is kept unless steps are clearly slower with it, and never if they were
#: slower by more than this share, however much they vary.
MOST_STATIC_LOSS = 0.02

#: Sizes are profiled again, so often at most in all, while the standard error of their step time is above this share of it, as
#: where processors are short. With 5 steps, 4 workers on two cores took sizes with which a step is 5 to 20 % longer. In the end
#: sizes that may be the fastest are profiled again in turn until it is clear which is.
MAX_ERROR, MOST_PROFILES = 0.01, 3
_MOST_SAMPLES = MOST_PROFILES * PROFILE_STEPS

#: A job with separate servers measures partitions of half the size, down to this one, as long as each makes a step faster by
#: that share. An average needs the pushes of all workers, and workers that are not quite equally fast have pushed different
#: partitions whenever a more urgent layer becomes ready. The averages of these wait, and the links of the servers idle. The
#: loss grows with the partition, and the simulator, whose workers are equal, does not know it: 4 workers with 4 servers took
#: 2842 ms with 0.115 MB, 2759 with 0.058 and 2668 with 0.029.
LEAST_HALF_BYTES, LEAST_HALF_GAIN = 16_000, 0.01


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of :class:`AutoChoice`. ``reason`` is ``chosen``, or ``unfinished`` if training, or the training of these
    tensors, ended first."""

    incumbent: SchedulerConfig
    kept: SchedulerConfig
    reason: str

    @property
    def finished(self) -> bool:
        return self.reason != "unfinished"

    def sentence(self) -> str:
        return f"sizes: {self.reason}: {describe_config(self.kept)}"


class AutoChoice:
    """Chooses sizes and order for training that is under way. Call it from rank 0's tuner thread only."""

    def __init__(self, context: TuningContext) -> None:
        self._context = context
        self.chosen: Chosen | None = None  # the latest result
        self._used: list[SchedulerConfig] = []  # by this choice, one after another
        self._profiles: dict[SchedulerConfig, Measured] = {}  # of those that were measured
        self._profiled: tuple[int, Measured] | None = None  # the group of the last choice, with a profile of what was kept
        self._chooses_sizes = self._chooses_order = False

    def profiled(self, group: int) -> Measured | None:
        """The profile of steps of ``group`` with the configuration that was kept for it, if its choice was the last one."""
        return self._profiled[1] if self._profiled is not None and self._profiled[0] == group else None

    def run(self, group: int, manifest: Manifest, again: bool = False) -> Chosen | None:
        """Choose for ``manifest``, the tensors of ``group``. Returns None if there is nothing to choose.

        Raises:
            Stopped: training ends.
        """
        incumbent, self._profiled = self._context.current(), None
        self._used, self._profiles = [incumbent], {}
        job, settings = self._context.job, self._context.settings
        self._chooses_order = (
            settings.order == "auto"
            and job.freezes
            and manifest.nbytes >= MIN_TELLING_BYTES
            and (self._context.may_freeze(group) or incumbent.order == "static")
        )
        space = Space(
            self._agreed(incumbent),
            max(1, manifest.nbytes),
            frozenset(name for name in ("partition", "credit") if getattr(settings, name) is not None),  # also in a tuned file
            largest_ratio=job.largest_ratio,
            least_ratio=job.least_ratio,
        )
        self._chooses_sizes = space.dimensions > 0
        if job.workers < 2 or not (self._chooses_sizes or self._chooses_order):
            return None
        try:
            chosen = self._choose(group, manifest, incumbent, space)
        except Exception as error:
            if is_end(error):
                raise
            chosen = self._given_up(error)
        self.chosen = chosen
        return chosen

    def _given_up(self, error: Exception) -> Chosen:
        """Keep the fastest sizes that were measured before ``error``."""
        incumbent, current = self._used[0], self._context.current()
        if self._chooses_order:  # a static order is kept only when it was compared
            self._profiles = {config: each for config, each in self._profiles.items() if config.order != "static"}
        if current not in self._used:  # somebody else has changed the configuration; it stays
            kept = current
        else:
            kept = self._best() if self._profiles else incumbent
            if kept != self._used[-1]:
                self._context.trials.apply(kept)
        what = "partition and credit stay as they are" if self._chooses_sizes else "the order of launches stays as it is"
        now = what if kept == incumbent else f"{describe_config(kept)} from now on"
        log.warning("%s: %s", now, error_text(error))
        return Chosen(incumbent, kept, "chosen")

    def _choose(self, group: int, manifest: Manifest, incumbent: SchedulerConfig, space: Space) -> Chosen:
        context, learner = self._context, self._context.learner
        # Whatever ended the earlier choice may have changed the configuration just now, so this choice waits for that first.
        if self.chosen is not None and not self._settle(group, incumbent):
            return Chosen(incumbent, incumbent, "unfinished")
        incumbent = context.current()
        count = partition_count(manifest, context.job.shards, incumbent.fusion_bytes)
        found, self._used, profiles = self._agreed(incumbent), [incumbent], self._profiles
        link = None
        with ExitStack() as stack:
            model: RemoteModel | None = None
            starts: list[SchedulerConfig] = []
            for round_ in range(ROUNDS + 1):
                if (over := self._measure(group, manifest, found)) is not None:
                    return over
                if round_ == ROUNDS or not self._chooses_sizes:
                    break
                profile = profiles[found]
                if model is None:
                    model = learner.open_model(profile, found, stack)
                    starts = learner.guesses(profile, incumbent.policy)
                elif profile.busy is None:
                    model = model.calibrate([(config, each.step_seconds) for config, each in profiles.items()])
                else:
                    seen = [each.busy for each in profiles.values() if each.busy is not None]
                    model = learner.open_model(replace(profile, link=fitted_link(profile.link, seen)), incumbent, stack)
                link = model.link
                fastest = min(profiles, key=self._seconds)
                most_bytes = self._most_bytes(fastest)
                found = best_sizes(model.predict, space, [fastest, *starts], context.job.ordered, most_bytes, count)
                if found in profiles or not _is_better(found, fastest, model, count):
                    if (telling := _telling(fastest, profiles, space, model, most_bytes)) is None:
                        break
                    found = telling
        if (over := self._compare(group, manifest)) is not None:
            return over
        kept = min(profiles, key=self._seconds) if context.job.servers else self._best()
        while context.job.servers and (half := _half(kept, manifest, space.fixed)) is not None:
            if half not in profiles and (over := self._measure(group, manifest, half)) is not None:
                return over
            if self._seconds(half) > (1 - LEAST_HALF_GAIN) * self._seconds(kept):
                break
            kept = half
        if self._chooses_order and context.may_freeze(group):
            static = replace(kept, order="static")
            if not self._use(group, static):
                return Chosen(incumbent, static, "unfinished")
            if context.is_static(group):  # otherwise readiness does not repeat itself
                if (over := self._measure(group, manifest, static)) is not None:
                    return over
                if not (context.is_static(group) and context.may_freeze(group)):  # it ended meanwhile
                    del profiles[static]
                elif self._is_worth_keeping(static, kept):
                    kept = static
        if kept != self._used[-1] and not self._use(group, kept):
            return Chosen(incumbent, kept, "unfinished")
        self._profiled = group, profiles[kept]
        context.say(self._line(kept, link))
        return Chosen(incumbent, kept, "chosen")

    def _measure(self, group: int, manifest: Manifest, config: SchedulerConfig) -> Chosen | None:
        """Profile steps with ``config``. Returns the result if the choice is over by that: training has ended, other tensors
        are trained, or somebody else has changed the configuration."""
        context, incumbent = self._context, self._used[0]
        if config != self._used[-1] and not self._use(group, config):
            return Chosen(incumbent, config, "unfinished")
        known = self._profiles.get(config)
        samples = () if known is None else known.samples
        for _ in range(MOST_PROFILES):
            try:
                profile = context.learner.profile(group, manifest)
            except NothingMeasured:
                if samples:  # the steps before are enough
                    break
                raise
            if profile is None:
                return Chosen(incumbent, config, "unfinished")
            if context.current() != config:  # it stays
                return Chosen(incumbent, context.current(), "chosen")
            samples += profile.samples
            self._profiles[config] = replace(profile, samples=samples)
            if self._error(config) <= MAX_ERROR * self._seconds(config) or len(samples) >= _MOST_SAMPLES:
                break
        return None

    def _compare(self, group: int, manifest: Manifest) -> Chosen | None:
        """Profile sizes again, in turn, until it is clear which are the fastest. Returns what :meth:`_measure` does."""
        while (config := self._least_known_rival()) is not None:
            known = self._profiles[config].samples
            if (over := self._measure(group, manifest, config)) is not None:
                return over
            if self._profiles[config].samples == known:  # nothing more can be measured
                break
        return None

    def _least_known_rival(self) -> SchedulerConfig | None:
        """Return the configuration with the fewest measured steps among the fastest one and those that may be faster. None if
        it is clear that no other one is faster by more than :data:`EQUAL_SIZES`, or if all were profiled often enough."""
        fastest = min(self._profiles, key=self._seconds)
        rivals = [config for config in self._profiles if config != fastest and not self._is_slower(config, fastest)]
        limit = EQUAL_SIZES * self._seconds(fastest)
        unclear = [config for config in rivals if self._uncertainty(config, fastest) > limit]
        few = [config for config in [fastest, *unclear] if len(self._profiles[config].samples) < _MOST_SAMPLES]
        return min(few, key=lambda config: len(self._profiles[config].samples)) if unclear and few else None

    def _seconds(self, config: SchedulerConfig) -> float:
        """The measured step time."""
        return self._profiles[config].step_seconds

    def _error(self, config: SchedulerConfig) -> float:
        """The standard error of :meth:`_seconds`. It is infinite for a few steps, which may be alike by chance."""
        if len(self._profiles[config].samples) < PROFILE_STEPS:
            return math.inf
        return standard_error(list(self._profiles[config].samples), self._seconds(config))

    def _is_slower(self, config: SchedulerConfig, fastest: SchedulerConfig) -> bool:
        """Whether ``config`` is clearly slower than ``fastest``."""
        least = max(CLEAR_DIFFERENCE * self._seconds(fastest), self._uncertainty(config, fastest))
        return self._seconds(config) > self._seconds(fastest) + least

    def _uncertainty(self, one: SchedulerConfig, other: SchedulerConfig) -> float:
        """The seconds by which measured step times must differ for the difference to be clear."""
        return CLEAR_ERRORS * math.hypot(self._error(one), self._error(other))

    def _is_worth_keeping(self, static: SchedulerConfig, agreed: SchedulerConfig) -> bool:
        seconds = self._seconds(static)
        return seconds <= (1 + MOST_STATIC_LOSS) * self._seconds(agreed) and not self._is_slower(static, agreed)

    def _best(self) -> SchedulerConfig:
        """The fastest configuration. Of those that are as fast within :data:`EQUAL_SIZES`, the one with the largest
        partition, and of these the one that was used last."""
        limit = (1 + EQUAL_SIZES) * min(map(self._seconds, self._profiles))
        equal = [config for config in reversed(self._used) if config in self._profiles and self._seconds(config) <= limit]
        return max(equal, key=lambda config: config.partition_bytes)

    def _most_bytes(self, fastest: SchedulerConfig) -> float:
        """The largest partition that is worth trying: the geometric middle between ``fastest`` and the smallest larger one that
        was slower, whatever the model predicts beyond it; infinite if none was."""
        size = fastest.partition_bytes
        larger = (config for config in self._profiles if config.partition_bytes > size)
        slower = (config.partition_bytes for config in larger if self._is_slower(config, fastest))
        return math.sqrt(size * min(slower, default=math.inf))

    def _agreed(self, config: SchedulerConfig) -> SchedulerConfig:
        """``config``, with an agreed order if the order is to be chosen."""
        return replace(config, order="agreed") if self._chooses_order else config

    def _use(self, group: int, config: SchedulerConfig) -> bool:
        """Apply ``config``, and :meth:`_settle`."""
        self._used.append(config)
        self._context.trials.apply(config)
        return self._settle(group, config)

    def _settle(self, group: int, config: SchedulerConfig) -> bool:
        """Wait until all ranks have agreed on what was applied last, and the first steps with ``config`` are over. False if
        training ended first, or other tensors are trained."""
        context, began, steps = self._context, time.monotonic(), 0
        while context.trials.applied not in (None, context.current()):
            if steps >= MOST_STEPS_TO_AGREE and time.monotonic() > began + MOST_SECONDS_TO_AGREE:
                break  # somebody else has changed the configuration since
            if not context.meter.wait_for_steps(group, 1):
                return False
            steps += 1
        return context.meter.wait_for_steps(group, context.trials.settle_steps(config))

    def _line(self, kept: SchedulerConfig, link: LinkEstimate | None) -> str:
        describe = describe_config if self._chooses_sizes else _describe_order
        line = f"{describe(kept)} chosen: steps of {milliseconds(self._seconds(kept))} ms"
        others = [f"{describe(each)}: {milliseconds(self._seconds(each))} ms" for each in self._profiles if each != kept]
        if others:
            line += f" (with {'; '.join(others)})"
        if link is not None:
            rate, each = 1e-6 / link.seconds_per_byte, 1e3 * link.partition_seconds
            least = "at least " if any(profile.is_assumed for profile in self._profiles.values()) else ""
            line += f"; simulated with a network of {least}{rate:.3g} MB/s of gradients, and {each:.2g} ms for a partition"
        return line


def partition_count(manifest: Manifest, shards: int, fusion_bytes: int | None = None) -> Callable[[int], int]:
    """Returns a function of the partition in bytes: the number of partitions of ``manifest``, spread over ``shards``."""
    return cache(lambda partition_bytes: len(cut(manifest, partition_bytes, fusion_bytes, shards).partitions))


def best_sizes(
    predict: Callable[[SchedulerConfig], float],
    space: Space,
    starts: Sequence[SchedulerConfig],
    ordered: bool = False,
    most_bytes: float = math.inf,
    count: Callable[[int], int] | None = None,
) -> SchedulerConfig:
    """The configuration of ``space`` with the least predicted step time, found by steps of an octave, then of half an octave,
    from the best of ``starts``. Partitions have at most ``most_bytes``. Among equal times (:data:`EQUAL_TIMES`; if ``ordered``,
    :data:`EQUAL_TIMES_OF_COLLECTIVES`) the largest partition is taken, and then the credit that is nearest to the starting
    point's in partitions. ``count`` returns the number of partitions of a size; with it the partition grows to one that
    tensors fill better (:data:`MOST_GROWTH`), and the credit with it.

    This is a pattern search (R. Hooke and T. A. Jeeves, "Direct search", JACM 1961) in the logarithms of partition and credit.
    Pure if ``predict`` is. A time that is not a positive number counts as infinite.
    """
    known: dict[SchedulerConfig, float] = {}

    def seconds(config: SchedulerConfig) -> float:
        if config not in known:
            predicted = predict(config) if config.partition_bytes <= most_bytes else math.inf
            known[config] = predicted if 0 < predicted < math.inf else math.inf
        return known[config]

    start = best = min(dict.fromkeys(map(space.clip, starts)), key=seconds)
    for factor in (2.0, 2.0**0.5):
        while (nearby := min(_neighbours(best, factor, space), key=seconds, default=best)) != best:
            if seconds(nearby) >= seconds(best):
                break
            best = nearby
    limit = (1 + (EQUAL_TIMES_OF_COLLECTIVES if ordered else EQUAL_TIMES)) * known[best]
    equal = [config for config, each in known.items() if each <= limit]
    ratio = _ratio(start)
    found = max(equal, key=lambda config: (config.partition_bytes, -abs(math.log(_ratio(config) / ratio))))
    if count is None or "partition" in space.fixed:
        return found
    fullest = _fuller(found, space, count)
    return next((config for config in fullest if seconds(config) <= limit), found)


def _fuller(found: SchedulerConfig, space: Space, count: Callable[[int], int]) -> list[SchedulerConfig]:
    """Sizes up to :data:`MOST_GROWTH` times those of ``found`` that tensors fill better, the fullest first. The credit holds as
    many partitions."""

    def held(config: SchedulerConfig) -> int:
        """The bytes that all partitions would hold."""
        return config.partition_bytes * count(config.partition_bytes)

    if held(found) <= WORTH_FILLING * space.total_bytes or count(found.partition_bytes) > MOST_COUNTED:
        return []
    least, most = found.partition_bytes, MOST_GROWTH * found.partition_bytes
    sizes = [round(least * MOST_GROWTH ** (step / _GROWTH_STEPS)) for step in range(1, _GROWTH_STEPS)]
    grown = [
        space.clip(replace(found, partition_bytes=size, credit_bytes=math.ceil(found.credit_bytes * size / least)))
        for size in sizes
    ]
    fits = [each for each in grown if least < each.partition_bytes < most and _in_credit(each) >= _in_credit(found)]
    return sorted((each for each in fits if held(each) < held(found)), key=held)


def _in_credit(config: SchedulerConfig) -> int:
    """The number of full partitions that fit into the credit."""
    return config.credit_bytes // config.partition_bytes


def _neighbours(config: SchedulerConfig, factor: float, space: Space) -> Iterator[SchedulerConfig]:
    for by in (factor, 1 / factor):
        partition, credit = round(config.partition_bytes * by), round(config.credit_bytes * by)
        for each in (replace(config, partition_bytes=partition, credit_bytes=credit), replace(config, credit_bytes=credit)):
            clipped = space.clip(each)
            if clipped != config:
                yield clipped


def _is_better(found: SchedulerConfig, current: SchedulerConfig, model: RemoteModel, count: Callable[[int], int]) -> bool:
    """Whether ``found`` is worth a change of all plans: it is faster, or it needs far fewer partitions."""
    gains = model.predict(found) <= (1 - MIN_PREDICTED_GAIN) * model.predict(current)
    return gains or count(found.partition_bytes) <= FAR_FEWER * count(current.partition_bytes)


def _telling(
    fastest: SchedulerConfig, measured: Collection[SchedulerConfig], space: Space, model: RemoteModel, most_bytes: float
) -> SchedulerConfig | None:
    """Larger sizes than ``fastest``, of at most ``most_bytes``, that show what partitions cost. None if they would cost too
    much, or are not free, or if partitions as large were ``measured`` already."""
    largest = max(config.partition_bytes for config in measured)
    for factor in TELLING_FACTORS:
        partition, credit = factor * fastest.partition_bytes, factor * fastest.credit_bytes
        larger = space.clip(replace(fastest, partition_bytes=partition, credit_bytes=credit))
        is_larger = largest < partition == larger.partition_bytes <= most_bytes
        if is_larger and model.predict(larger) <= (1 + MAX_TELLING_LOSS) * model.predict(fastest):
            return larger
    return None


def _half(config: SchedulerConfig, manifest: Manifest, fixed: frozenset[str]) -> SchedulerConfig | None:
    """Return partitions of half the size, or of half the largest tensor if that is smaller, since sizes between the two cut no
    tensor. None if they would be too small, or are fixed."""
    partition = min(config.partition_bytes, max(tensor.nbytes for tensor in manifest.tensors)) // 2
    if "partition" in fixed or partition < LEAST_HALF_BYTES:
        return None
    credit = config.credit_bytes * partition // config.partition_bytes
    return replace(
        config, partition_bytes=partition, credit_bytes=config.credit_bytes if "credit" in fixed else max(partition, credit)
    )


def _describe_order(config: SchedulerConfig) -> str:
    article = "an" if config.order == "agreed" else "a"
    return f"{article} {config.order} order"


def _ratio(config: SchedulerConfig) -> float:
    return max(1.0, config.credit_bytes / config.partition_bytes)
