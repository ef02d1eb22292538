"""Join: ranks that run out of batches take part with zeros until all have, so that ranks may have different numbers of batches.

An *exhausted* rank, one that has run out of batches, has to know what the live ranks do. They announce it: one small message
per round says which optimizer's round begins, and another one that parameters get places. An exhausted rank contributes to the
message that it waits for, and learns from it what to take part in, or that no rank is live any more.

An exhausted rank makes no updates, because it does not know the hyper-parameters that the live ranks' code sets. At the end it
takes over what a rank has that made all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

import commsched

from ...core.comparison import Difference, require_same
from ...core.errors import ConfigError, UnsupportedError
from .announcements import Announcements
from .device import Device

if TYPE_CHECKING:
    from .exchange import GradientExchange
    from .optimizer import ScheduledOptimizer

#: The announcements of each set of optimizers, by their numbers. They last as long as the session: a Join that an exception
#: has ended may leave a message that other ranks have not sent yet.
_announcements: WeakKeyDictionary[commsched.Session, dict[tuple[int, ...], Announcements]] = WeakKeyDictionary()

#: The threads that use a Join in each session. There are several if each trains a model of its own.
_in_use: WeakKeyDictionary[commsched.Session, list[int]] = WeakKeyDictionary()


def require_joined(session: commsched.Session) -> None:
    """Require that no Join is in use, for an optimizer that is in none. Raises UnsupportedError: a rank that runs out of
    batches would not take part in its rounds."""
    if _in_use.get(session):
        raise UnsupportedError(
            "gradients of a ScheduledOptimizer that is not in the Join would wait for ranks that have run out of batches: give "
            "Join all optimizers whose gradients are made within it"
        )


class Join:
    """Let ranks have different numbers of batches, as ``torch.distributed.algorithms.Join`` does::

        with Join([optimizer]):
            for batch in loader:
                ...

    A rank that leaves the context contributes zeros to the averages of the others until they have left it, too. Then all ranks
    have the parameters, buffers and optimizer states of one that has made all updates. Enter the context on all ranks.

    Args:
        optimizers: all whose gradients are made within the context.
        enable: ``False`` makes the context do nothing.
        throw_on_early_termination: end the context on all ranks with RuntimeError when the first one has run out of batches.
        divide_by_initial_world_size: whether sums of gradients are divided by the number of all ranks, or by the number of
            those that have not run out of batches when backward begins.
        states: schedulers, a ``GradScaler`` and other objects with ``state_dict()`` and ``load_state_dict()`` that live ranks
            change in each step. At the end the others take over the numbers in their states, too.

    Raises:
        TypeError: ``optimizers`` or ``states`` is not a sequence of such objects.
        ValueError: there are no optimizers.
        ConfigError: an optimizer is detached or in another Join, this is within another Join, or the
            arguments differ between ranks.
        UnsupportedError: see ``docs/pytorch.md``.
        CommschedError: the session failed or was closed.
    """

    def __init__(
        self,
        optimizers: Sequence[ScheduledOptimizer],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        divide_by_initial_world_size: bool = True,
        states: Sequence[Any] = (),
    ) -> None:
        _require_arguments(optimizers, states)
        self._members = [(each, exchange) for each in optimizers if enable and (exchange := each._joined()) is not None]
        self._throws = throw_on_early_termination
        self._by_all = divide_by_initial_world_size
        self._states = states
        self._hearing = Lock()  # several threads may wait for averages
        self._unheard: int | None = None  # the number of the exchange whose round is announced by the message not heard yet
        self._live: dict[int, float] = {}  # by number: the share of ranks that were live when the round began

    def __enter__(self) -> Join:
        if not self._members:
            return self
        exchanges = [exchange for _, exchange in self._members]
        session = self._members[0][0]._session
        if any(exchange.join is not None for exchange in exchanges) or len(set(exchanges)) < len(exchanges):
            raise ConfigError("a ScheduledOptimizer is in two Joins at once, or twice in one")
        in_use = _in_use.setdefault(session, [])
        if get_ident() in in_use:
            raise ConfigError(
                "a Join within another one: a rank that leaves the inner one would take part in the rounds of its optimizers "
                "only, and the others would wait; give one Join all optimizers"
            )
        numbers = tuple(exchange.places.number for exchange in exchanges)
        known = _announcements.setdefault(session, {})
        count = known[numbers].count if numbers in known else 0
        record = {
            "optimizers": list(numbers),
            "throw_on_early_termination": self._throws,
            "divide_by_initial_world_size": self._by_all,
            "states": [type(each).__name__ for each in self._states],
        }
        records = session.gather({"arguments": record, "count": count}, "to enter a Join")
        require_same([each["arguments"] for each in records], _other_arguments, ConfigError)
        if numbers not in known:
            known[numbers] = Announcements(session, self._device)
        self._announcements = known[numbers]
        while self._announcements.count < max(each["count"] for each in records):
            self._say(False, 0)  # ranks have left the last Join by an exception, after different numbers of rounds
        for exchange in exchanges:
            exchange.use_join(self)
        self._thread = get_ident()
        in_use.append(self._thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._members:
            return
        try:
            if kind is None:
                self._follow()
        except BaseException:
            self._break_off()
            raise
        else:
            if kind is not None:
                self._break_off()
        finally:
            _in_use[self._members[0][0]._session].remove(self._thread)
            for _, exchange in self._members:
                exchange.use_join(None)

    def _break_off(self) -> None:
        """Tell the other ranks that an exception makes this one leave: those that stay would wait for it. Waits for no rank.
        A failure to do so is not raised: the exception that made this rank leave says more."""
        with suppress(Exception):
            self._announcements.say(self._device, False, 0, broken=True)

    # --- a live rank ---

    def begins(self, exchange: GradientExchange, waits: bool) -> tuple[float, float]:
        """Announce a round of ``exchange``. Return the factor for all gradients of this rank, and the one for averages that all
        live ranks contribute again.

        Waits until all ranks have begun the last announced round; and until they have begun this one if it ``waits``, or has
        to know which ranks are live. Raises RuntimeError if a rank is exhausted and ``throw_on_early_termination`` was set.
        """
        number = exchange.places.number
        self._announce(2 * number)
        self._unheard = number
        return self._factors(self.live_share(exchange)) if waits or self._throws or not self._by_all else (1.0, 1.0)

    def gives_places(self, exchange: GradientExchange) -> None:
        """Announce that parameters of ``exchange`` get places, which is collective."""
        self._announce(2 * exchange.places.number + 1)
        self._announcements.hear()  # a rank that has left by an exception would not take part

    def live_share(self, exchange: GradientExchange) -> float:
        """The share of ranks that were live when the last round of ``exchange`` began. May wait until all have begun it."""
        number = exchange.places.number
        if self._unheard == number:
            self._hear()
        return self._live.get(number, 1.0)

    def _announce(self, number: int) -> None:
        self._hear()
        self._say(True, number)

    def _hear(self) -> None:
        with self._hearing:
            if self._unheard is not None:
                self._live[self._unheard], _ = self._announcements.hear()
                self._unheard = None

    def _say(self, live: bool, number: int) -> None:
        self._announcements.say(self._device, live, number)

    @property
    def _device(self) -> Device:
        return self._members[0][1].places.device

    def _factors(self, live: float) -> tuple[float, float]:
        if self._throws and live < 1.0:
            raise RuntimeError("a rank has run out of batches, and throw_on_early_termination is set for the Join")
        return (1.0, 1.0 / live) if self._by_all else (1.0 / live, 1.0)

    # --- an exhausted rank ---

    def _follow(self) -> None:
        """Take part in the rounds of the live ranks until there are none, then take over what they have."""
        left = [exchange.leave_round() for _, exchange in self._members]
        self._hear()
        self._say(False, 0)
        for optimizer, _ in self._members:
            optimizer.synchronize()
        behind, followed = [False] * len(left), [False] * len(left)
        numbers = [exchange.places.number for _, exchange in self._members]
        while True:
            live, number = self._announcements.hear()
            if live == 0.0:
                break
            factor, _ = self._factors(live)
            self._say(False, 0)  # now: a live rank may wait for it before it does anything else
            place = numbers.index(number // 2)
            exchange = self._members[place][1]
            if number % 2:
                exchange.follow_places()
                continue
            behind[place] |= self._take_over_end(place, followed[place])
            exchange.follow_round(factor)
            left[place] = followed[place] = True
        for place in range(len(left)):
            behind[place] |= self._take_over_end(place, followed[place])
        self._share(left, behind, followed)

    def _take_over_end(self, place: int, followed: bool) -> bool:
        optimizer, exchange = self._members[place]
        if not exchange.take_over_end():
            return False
        if not followed and self._live.get(exchange.places.number) == 1.0:
            optimizer._compare_weights()  # the live ranks have compared theirs when they called step()
        return True

    def _share(self, left: list[bool], behind: list[bool], followed: list[bool]) -> None:
        """Take over what the live ranks had at the end."""
        session = self._members[0][0]._session
        kept = [exchange.averages_kept for _, exchange in self._members]
        records = session.gather(list(zip(behind, followed, kept)), "to leave a Join")
        owner: int | None = None
        for place, (optimizer, exchange) in enumerate(self._members):
            of_each = [record[place] for record in records]
            # The first rank that has made all updates, one that was live in the last round if possible.
            root = min(range(len(of_each)), key=lambda rank: (of_each[rank][:2], rank))
            if any(late for late, *_ in of_each):
                optimizer._take_over(root)
                owner = root if owner is None else owner
            if left[place] and of_each[root][2] is not None:
                exchange.keep_averages(of_each[root][2])
        if self._states and owner is not None:
            own = [each.state_dict() for each in self._states]
            said = session.gather(json.dumps(list(map(_numbers, own))) if session.rank == owner else None, "to leave a Join")
            for each, state, theirs in zip(self._states, own, json.loads(said[owner])):
                each.load_state_dict(_with_numbers(state, theirs))


def _require_arguments(optimizers: Any, states: Any) -> None:
    if not _listed(optimizers) or not all(hasattr(each, "_joined") for each in optimizers):
        raise TypeError(f"Join takes a list of ScheduledOptimizers, as in Join([optimizer]), not {_kinds(optimizers)}")
    if not optimizers:
        raise ValueError("Join needs at least one ScheduledOptimizer, as in Join([optimizer])")
    loads = (
        [hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in states] if _listed(states) else [False]
    )
    if not all(loads):
        raise TypeError(
            "states of a Join is a list of objects with state_dict() and load_state_dict(), as in states=[scheduler, scaler], "
            f"not {_kinds(states)}"
        )


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _kinds(value: Any) -> str:
    return f"[{', '.join(type(each).__name__ for each in value)}]" if _listed(value) else f"a {type(value).__name__}"


def _other_arguments(different: Difference) -> str:
    return f"ranks enter a Join with other arguments: {different.key} is {different.text()}"


def _numbers(state: Any) -> Any:
    """The numbers, strings and the like in ``state``, in the same structure, as JSON."""
    if isinstance(state, Mapping):
        return {str(key): _numbers(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return list(map(_numbers, state))
    if isinstance(state, torch.Tensor) and state.numel() == 1:
        return state.item()
    return state if isinstance(state, int | float | str) else None


def _with_numbers(state: Any, numbers: Any) -> Any:
    """A copy of ``state`` that has ``numbers``, which :func:`_numbers` has made of another rank's state."""
    if isinstance(state, dict) and isinstance(numbers, dict):
        state = copy.copy(state)  # keeps its class
        for key in [key for key in state if str(key) in numbers]:
            state[key] = _with_numbers(state[key], numbers[str(key)])
        return state
    if type(state) in (list, tuple) and isinstance(numbers, list) and len(state) == len(numbers):
        return type(state)(map(_with_numbers, state, numbers))
    if isinstance(state, torch.Tensor) and state.numel() == 1 and numbers is not None:
        return torch.full_like(state, numbers)
    return numbers if state is None or isinstance(state, int | float | str) else state
