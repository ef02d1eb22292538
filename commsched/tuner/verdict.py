"""The verdict of a search: its reason, its result and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ..core.config import SchedulerConfig
from .format import milliseconds, size

#: kept: the winner was confirmed. no gain: no tried configuration was better, so there was nothing to confirm. not confirmed:
#: the comparison did not show the gain beyond doubt. failed: too many trials failed in a row, or all except the incumbent's
#: failed. unfinished: training, or the training of these tensors, ended first.
Reason = Literal["kept", "no gain", "not confirmed", "failed", "unfinished"]


def describe_config(config: SchedulerConfig, beside: SchedulerConfig | None = None) -> str:
    """Describe ``config`` for people, in decimal units: ``partition 2.0 MB, credit 8.0 MB``. The policy is added if it differs
    from the policy of ``beside``."""
    text = f"partition {size(config.partition_bytes)}, credit {size(config.credit_bytes)}"
    return text if beside is None or beside.policy == config.policy else f"{text}, policy {config.policy}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of tuning and the configuration that it keeps.

    ``winner`` is the best configuration that was tried. ``gain`` is the part of the step time that it saves against
    ``incumbent`` (0.18 is 18 %; negative if it is slower). ``low`` and ``high`` are the ends of the 95 % interval, from
    ``pairs`` pairs of windows (the pairs of ``stats.Comparison``). These four are 0 if there was no comparison. The two
    ``..._seconds`` are the step times in these pairs, or otherwise in the search; 0 if not measured. ``trials`` is the number
    of trials of the search. ``others`` is the number of its windows of other configurations than the incumbent. ``steps`` and
    ``seconds`` are the total cost of tuning, including an earlier job that was killed.
    """

    reason: Reason
    kept: SchedulerConfig
    incumbent: SchedulerConfig
    winner: SchedulerConfig
    trials: int
    others: int
    steps: int
    seconds: float
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    incumbent_seconds: float = 0.0
    winner_seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the search is complete, so that it need not be repeated."""
        return self.reason in ("kept", "no gain", "not confirmed") and self.others > 0

    def sentence(self) -> str:
        """The verdict as one sentence for the log."""
        cost = f"tuning: {self.trials} trials, {self.seconds:.0f} s"
        stays = f"{describe_config(self.incumbent)} kept"
        if self.reason == "unfinished":
            return f"{cost}: not finished; {stays}"
        if self.reason == "failed":
            nothing_else = self.incumbent_seconds > 0 and self.others == 0
            why = "no other configuration could be measured" if nothing_else else "too many trials in a row failed"
            return f"{cost}: {why}; {stays}"
        if self.winner == self.incumbent:
            why = "nothing tried was faster" if self.others else "nothing was tried"
            return f"{cost}: no gain, {why}; {stays}"
        winner = describe_config(self.winner, self.incumbent)
        took = f"{milliseconds(self.winner_seconds)} ms instead of {milliseconds(self.incumbent_seconds)} ms"
        interval = f"95 % between {_change(self.low)} and {_change(self.high)}, {self.pairs} pairs"
        compared = f"{winner}: {took} ({_change(self.gain)}, {interval})"
        return f"{cost}: {compared}: {'kept' if self.reason == 'kept' else f'not confirmed; {stays}'}"

    def to_record(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_record`; other keys are ignored. Raises KeyError or TypeError if ``record`` is not a
        verdict."""
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{**values, **{name: SchedulerConfig(**values[name]) for name in ("kept", "incumbent", "winner")}})


def _change(gain: float) -> str:
    return f"{-100 * gain:+.1f} %"
