"""How tuning ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ..core.config import SchedulerConfig
from .text import milliseconds, size

#: kept: the winner was confirmed. no gain: nothing tried was better, so there was nothing to confirm. not confirmed: the
#: comparison did not show it beyond doubt. failed: trial after trial came to nothing, or all but the incumbent's. unfinished:
#: training, or the training of these tensors, ended first.
Reason = Literal["kept", "no gain", "not confirmed", "failed", "unfinished"]


def describe(config: SchedulerConfig, beside: SchedulerConfig | None = None) -> str:
    """For people, in decimal units: ``partition 2.0 MB, credit 8.0 MB``, and the policy where it is another ``beside``."""
    text = f"partition {size(config.partition_bytes)}, credit {size(config.credit_bytes)}"
    return text if beside is None or beside.policy == config.policy else f"{text}, policy {config.policy}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What tuning found, and what it keeps.

    ``winner`` is the best that was tried. ``gain`` is the part of the step time that it saves against ``incumbent`` (0.18 is
    18 %; negative if it is slower), ``low`` and ``high`` the ends of the 95 % interval, from ``pairs`` pairs of windows, those
    of ``compare.Comparison``; all 0 if there was no comparison. The two ``..._seconds`` are the step times in these pairs, or
    in the search; 0 if not measured. ``trials`` are those of the search; ``others``, how many of them are windows of another
    configuration than the incumbent. ``steps`` and ``seconds`` are all that tuning took, also in a job before that was
    killed.
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
        """Whether the search came to its end, so that it need not be made again."""
        return self.reason in ("kept", "no gain", "not confirmed") and self.others > 0

    def sentence(self) -> str:
        """For the log."""
        cost = f"tuning: {self.trials} trials, {self.seconds:.0f} s"
        stays = f"{describe(self.incumbent)} kept"
        if self.reason == "unfinished":
            return f"{cost}: not finished; {stays}"
        if self.reason == "failed":
            nothing_else = self.incumbent_seconds > 0 and self.others == 0
            why = "no other configuration could be measured" if nothing_else else "too many trials in a row failed"
            return f"{cost}: {why}; {stays}"
        if self.winner == self.incumbent:
            why = "nothing tried was faster" if self.others else "nothing was tried"
            return f"{cost}: no gain, {why}; {stays}"
        winner = describe(self.winner, self.incumbent)
        took = f"{milliseconds(self.winner_seconds)} ms instead of {milliseconds(self.incumbent_seconds)} ms"
        interval = f"95 % between {_change(self.low)} and {_change(self.high)}, {self.pairs} pairs"
        compared = f"{winner}: {took} ({_change(self.gain)}, {interval})"
        return f"{cost}: {compared}: {'kept' if self.reason == 'kept' else f'not confirmed; {stays}'}"

    def to_record(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_record`; other keys are left aside. KeyError or TypeError if it is none."""
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{**values, **{name: SchedulerConfig(**values[name]) for name in ("kept", "incumbent", "winner")}})


def _change(gain: float) -> str:
    return f"{-100 * gain:+.1f} %"
