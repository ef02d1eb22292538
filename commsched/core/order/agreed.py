"""AgreedOrder: all ranks start the same tasks in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..errors import OrderMismatch, PeerLost, ProtocolError
from ..scheduler import CreditWindow, Policy
from ..task import CommTask
from .leader import OrderLeader, peer_left_error
from .messages import (
    EMPTY,
    LARGEST,
    OTHERS,
    Freeze,
    FreezeRefused,
    KeepAgreed,
    Launch,
    LaunchKey,
    LaunchRefused,
    Leaves,
    OrderMessage,
    StaticStep,
    TasksReady,
    decode,
    encode,
    extend_digest,
    extend_digest_by_text,
)
from .static import PatternEntry, ReadinessPattern, StaticOrder


class AgreedOrder:
    """Launches the tasks that rank 0 decided on (:class:`~.leader.OrderLeader`), in that order; see ``order.Order``. Pure.

    Ranks report their ready tasks to rank 0, together with their launches since the last report. Rank 0 announces launches.
    An announcement carries the digest of all launches up to its end. Each rank computes the same digest from its own tasks and
    compares it before it launches anything. On each channel every rank launches in the announced order, as far as its own
    credit goes. The first task that is not done anywhere is the next of every rank that has not launched it, so credits cannot
    block each other.

    With a hierarchy, only the leaders of hosts agree, each for the ranks of its host. Another rank starts a task, which is its
    contribution, as soon as it is ready. A leader reports a task when it has all contributions of its host
    (``Transport.collect``). In a frozen order every rank starts tasks by that order.

    Args:
        leaders: by rank, the rank that launches for it. Rank 0 is a leader.
        channels: the number of the transport's channels: see ``messages.LARGEST``.
        freeze: see :meth:`let_freeze`. Needs two channels.
        describe: names a task, for messages.
        locate: returns the bytes that a task covers by its group's plan here; empty if the plan has no such task.
    """

    def __init__(
        self,
        rank: int,
        leaders: Sequence[int],
        policy: Policy,
        credit_bytes: int,
        *,
        channels: int = 2,
        freeze: bool = False,
        describe: Callable[[LaunchKey], str] = str,
        locate: Callable[[LaunchKey], str] = str,
    ) -> None:
        self._rank = rank
        self._policy = policy
        self._describe = describe
        self._locate = locate
        self._ready: dict[LaunchKey, CommTask] = {}  # tasks that are ready here and whose launch is not yet agreed on
        # By channel: the tasks to start, in this order; the credit; and the number of tasks that were started.
        self._agreed: list[deque[CommTask]] = [deque() for _ in range(channels)]
        self._credits = [CreditWindow(credit_bytes) for _ in range(channels)]
        self._sequences = [0] * channels
        self._received = 0  # number of agreed launches known here
        self._digest = EMPTY  # digest of these launches
        self._offers: list[LaunchKey] = []  # tasks that are ready here and not yet reported to rank 0
        self._outgoing: list[OrderMessage] = []
        self._frozen: StaticOrder | None = None
        # Tasks to start on ``LARGEST`` that rank 0 announced during the frozen order, so after that had ended on rank 0. They
        # come after the tasks that are left of its last step here. A task of that step was launched here: rank 0 has the
        # averages of the step, to which every rank contributes.
        self._after_frozen: deque[CommTask] = deque()
        self._last_frozen: StaticOrder | None = None  # the current frozen order, or the last one if it has ended
        self._freezes = 0  # number of frozen orders so far
        self._asked = False  # an end of the frozen order was requested
        self._decider = OrderLeader(leaders, policy, describe, channels) if rank == 0 else None
        self._pattern: ReadinessPattern | None = None
        self._may_freeze: set[int] = set()  # groups whose order may be static, as far as this rank knows
        self._kept_agreed: set[int] = set()  # on rank 0: groups of which another rank said so before they were added here
        self._next_group = 0  # the number after that of the group that was added last
        self._unwanted = False  # the group of the frozen order is not among these any more; only known on rank 0
        self.let_freeze(freeze)
        self._static_digests: dict[int, dict[int, str]] = {}  # on rank 0: digests of static steps, by step and rank
        self._leaders = leaders
        self._launchers = sorted(set(leaders))
        self._is_led = leaders[rank] != rank
        self._collects = leaders.count(rank) > 1
        self._collecting: set[LaunchKey] = set()  # tasks in ``_ready`` to which other ranks of this host have yet to contribute
        self._to_collect: list[CommTask] = []
        # On a rank that is led, by group: the last step that it has contributed to outside a frozen order, and what.
        self._contributed: dict[int, tuple[int, list[PatternEntry]]] = {}
        # By group: the last step in ``_contributed`` when the plan changed. An order that was frozen before then has ended.
        self._contributed_before: dict[int, int] = {}
        self._left: set[int] = set()
        self._last_steps: dict[int, dict[int, tuple[int, int]]] = {}  # by rank that left and group; see ``StaticOrder.leave``

    # --- order.Order ---

    def add(self, task: CommTask) -> int:
        """See ``order.Order``.

        Raises:
            PeerLost: the task needs an agreement of all ranks, and one of them has left.
        """
        key = LaunchKey.of(task)
        if self._frozen is not None and self._frozen.covers(key):
            self._frozen.add(task)
        elif self._is_led:
            self._contribute(task)
        else:
            self._ready[key] = task
            if self._collects:
                self._collecting.add(key)
                self._to_collect.append(task)
            else:
                self._offer(key)
        return self._policy.key(task)

    def _contribute(self, task: CommTask) -> None:
        self._agreed[OTHERS].append(task)
        step, entries = self._contributed[task.group]
        if task.step != step:
            entries = []
            self._contributed[task.group] = task.step, entries
        entries.append((task.partition.index, task.verb))

    def _offer(self, key: LaunchKey) -> None:
        if self._decider is not None:
            self._offered(self._decider, 0, key, self._freezes)
        elif 0 in self._left:
            raise peer_left_error(0, self._describe(key))
        else:
            self._offers.append(key)

    def next(self) -> CommTask | None:
        for channel, (agreed, credit) in enumerate(zip(self._agreed, self._credits)):
            if self._decider is not None and not agreed:
                self._decide(self._decider, channel)
            if agreed and credit.admits(agreed[0].nbytes):
                credit.take(agreed[0].nbytes)
                return self._started(agreed.popleft(), channel)
        frozen = self._frozen
        # Launches that rank 0 decided on before it froze the order come first on every rank.
        if frozen is None or self._agreed[LARGEST]:
            return None
        if self._after_frozen and frozen.is_between_steps:
            self._begin_after_frozen()
            return self.next()
        if (task := frozen.next()) is None:
            return None
        if (done := frozen.end_step()) is not None:
            self._static_step_ended(frozen, *done)
        return self._started(task, LARGEST)

    def has_work(self) -> bool:
        """See ``order.Order``. It may be True in vain: a frozen order launches what is ready, if the credit admits it."""
        return bool(
            self._offers
            or self._outgoing
            or self._to_collect
            or self._frozen is not None
            or any(self._agreed)
            or (self._decider is not None and self._decider.has_ready)
        )

    def _begin_after_frozen(self) -> None:
        self._agreed[LARGEST].extend(self._after_frozen)
        self._after_frozen.clear()

    def _started(self, task: CommTask, channel: int) -> CommTask:
        task.channel, task.sequence = channel, self._sequences[channel]
        self._sequences[channel] += 1
        return task

    def sent(self, task: CommTask) -> None:
        self._credits[task.channel].give_back(task.nbytes)
        if self._frozen is not None and self._frozen.group == task.group:
            self._frozen.sent(task)

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        self._policy = policy
        for credit in self._credits:
            credit.limit = credit_bytes
        if self._decider is not None:
            self._decider.use(policy)

    def let_freeze(self, freeze: bool) -> None:
        """``freeze``: once the order of the largest group has repeated for some steps, freeze it, if the group allows that:
        launch it without messages (:class:`~.static.StaticOrder`), until the configuration changes. Rank 0 decides on that, so
        only its value counts. A frozen order does not end by this call."""
        if self._decider is None or freeze == (self._pattern is not None):
            return
        self._pattern = ReadinessPattern() if freeze else None

    # --- other events from Core ---

    def add_group(self, group: int, nbytes: int, may_freeze: bool) -> None:
        """Add a group of ``nbytes`` bytes, whose order ``may_freeze``. Call it before the group's first task."""
        self._contributed[group] = (-1, [])
        self._next_group = group + 1
        if may_freeze and group not in self._kept_agreed:
            self._may_freeze.add(group)
        self._kept_agreed.discard(group)
        if self._decider is not None:
            self._decider.add_group(group, nbytes)

    def may_freeze(self, group: int) -> bool:
        return group in self._may_freeze

    def keep_agreed(self, group: int) -> None:
        """Note that the order of ``group`` must not be static any more, on this rank or another. Rank 0 ends one that is."""
        if group >= self._next_group:
            self._kept_agreed.add(group)
        if group not in self._may_freeze:
            return
        self._may_freeze.discard(group)
        if self._decider is None:
            self._outgoing.append(KeepAgreed(group))
        elif self._frozen is not None and self._frozen.group == group:
            self._unwanted = True

    def release(self, group: int) -> None:
        """Forget ``group``, which has had its last step."""
        self._thaw(group)
        self._may_freeze.discard(group)
        self._contributed.pop(group, None)
        self._contributed_before.pop(group, None)
        if self._pattern is not None:
            self._pattern.forget(group)
        if self._decider is not None:
            self._decider.release(group)

    def recut(self, group: int) -> None:
        """Note that ``group`` begins a step with another plan, the same on every rank. A frozen order of the group does not fit
        that plan, so it ends. No task of the group is outstanding."""
        self._thaw(group)
        if group in self._contributed:
            self._contributed_before[group] = self._contributed[group][0]
        if self._pattern is not None:
            self._pattern.forget(group)

    def leave(self, rank: int) -> None:
        """Note that ``rank`` will launch nothing more.

        Raises:
            PeerLost: a task waits for that rank.
        """
        self._left.add(rank)
        if self._decider is not None:
            self._decider.leave(rank)
        elif rank == 0 and self._ready:
            raise peer_left_error(0, self._describe(next(iter(self._ready))))

    def prepare_leave(self, first_missing_steps: Mapping[int, int]) -> None:
        """Announce that this rank will launch nothing more. ``first_missing_steps`` maps each group to the first step that this
        rank does not complete."""
        steps = [(group, step, self._launched(group, step)) for group, step in first_missing_steps.items()]
        self._outgoing.append(Leaves(self._rank, steps))

    def _launched(self, group: int, step: int) -> int:
        """The number of tasks of ``step`` that count as launched in a frozen order. A rank that is led may not have heard of
        that order yet. All that it contributed to is complete when it leaves, so it is the beginning of that order."""
        if self._frozen is not None and self._frozen.group == group:
            return self._frozen.launched(step)
        contributed, entries = self._contributed.get(group, (-1, []))
        return len(entries) if contributed == step else 0

    def wants_change(self) -> bool:
        """Whether to request a change of configuration, because the frozen order does not fit any more, or is not wanted. Any
        agreed change ends a frozen order. True once for each frozen order."""
        if self._frozen is None or self._asked or not (self._unwanted or self._frozen.is_stale):
            return False
        self._asked = True
        return True

    def blocked_count(self, group: int) -> int:
        """The number of ready tasks of ``group`` that wait, in a frozen order, for an earlier task that is not ready."""
        return self._frozen.blocked_count() if self._frozen is not None and self._frozen.group == group else 0

    def deadlock_error(self, include_blocked: bool = True) -> PeerLost | None:
        """The PeerLost error if an outstanding task of a frozen order can never complete because a rank has left; otherwise
        None. ``include_blocked`` includes the tasks that :meth:`blocked_count` counts."""
        return self._frozen.deadlock_error(include_blocked) if self._frozen is not None else None

    # --- collecting ---

    def to_collect(self) -> list[CommTask]:
        """Return the tasks to pass to ``Transport.collect`` now."""
        tasks, self._to_collect = self._to_collect, []
        return tasks

    def collected(self, tasks: Sequence[CommTask]) -> None:
        """Note that all ranks of this host have contributed to ``tasks``.

        Raises:
            PeerLost: see :meth:`add`.
        """
        for key in map(LaunchKey.of, tasks):
            if key in self._collecting:  # otherwise a frozen order includes it by now
                self._collecting.discard(key)
                self._offer(key)

    # --- messages ---

    def outgoing(self) -> list[tuple[dict[str, Any], Sequence[int]]]:
        """Return the messages to send now, in order, as JSON: to rank 0; or from rank 0 to the other ranks given with each, or
        to all others if none are given."""
        if self._offers:
            # A task that will start unconditionally, in the agreed order, counts as launched.
            self._outgoing.append(TasksReady(self._offers, self._freezes, self._received, self._digest))
            self._offers = []
        messages, self._outgoing = self._outgoing, []
        leaders = self._launchers if len(self._launchers) < len(self._leaders) else ()
        return [(encode(message), leaders if isinstance(message, Launch) else ()) for message in messages]

    def on_message(self, rank: int, record: Any) -> None:
        """Handle a message that ``rank`` sent to rank 0; called on rank 0.

        Raises:
            OrderMismatch: ``rank`` launched another task than rank 0.
            PeerLost: a task waits for a rank that has left.
            ProtocolError: the message is malformed, or this is not rank 0.
        """
        decider = self._decider
        if decider is None:
            raise ProtocolError(f"rank {rank} sent rank {self._rank} a message that only rank 0 receives")
        try:
            message = decode(record)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"rank {rank} sent rank 0 a message that no order knows: {error!r}") from error
        if self._leaders[rank] != rank and not isinstance(message, Leaves | FreezeRefused | KeepAgreed):
            raise ProtocolError(f"rank {rank} sent rank 0 a message that only leaders of hosts send: {message}")
        match message:
            case Leaves(left, steps):
                self._outgoing.append(message)  # forwarded to the other ranks
                self._rank_leaves(left, steps)
            case FreezeRefused(keys):
                self._refused_freeze(rank, keys)
            case KeepAgreed(group):
                self.keep_agreed(group)
            case StaticStep(step, digest, freezes):
                if freezes == self._freezes:  # else the order has ended, and another one may have begun, meanwhile
                    self._confirm_static(rank, step, digest)
            case LaunchRefused(first, launched):
                decider.require_same(rank, first, launched)
                raise OrderMismatch(
                    f"rank {rank} cannot launch {self._describe(launched[-1])} as rank 0 does: it is not ready there, "
                    "or that rank has cut its tensors differently"
                )
            case TasksReady(ready, freezes, count, digest):
                decider.confirm(rank, count, digest)
                for key in ready:
                    self._offered(decider, rank, key, freezes)
            case _:
                raise ProtocolError(f"rank {rank} sent rank 0 a message that only rank 0 sends: {message}")

    def on_announced(self, record: Any) -> None:
        """Handle a message that rank 0 announced; called on the other ranks.

        Raises:
            ProtocolError: the message is malformed.
        """
        try:
            message = decode(record)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"rank 0 announced a message that no order knows: {error!r}") from error
        match message:
            case Leaves(rank, steps):
                self._rank_leaves(rank, steps)
            case Freeze(keys, digest):
                self._follow_freeze(keys, digest)
            case Launch(channel, first, keys, digest):
                self._follow(channel, first, keys, digest)
            case _:
                raise ProtocolError(f"rank 0 announced a message that only other ranks send: {message}")

    def _follow(self, channel: int, first: int, keys: list[LaunchKey], digest: str) -> None:
        mine, tasks = self._digest, []
        for key in keys:
            task = self._ready.get(key)
            if task is None or key in self._collecting:
                break
            mine = extend_digest(mine, task, channel)
            tasks.append(task)
        known = 0 <= channel < len(self._agreed)
        if not known or first != self._received or len(tasks) < len(keys) or mine != digest:
            # None of these tasks is launched. Rank 0 knows what it announced, so it raises the error that names both tensors.
            self._outgoing.append(LaunchRefused(first, keys))
            return
        for task in tasks:
            del self._ready[LaunchKey.of(task)]
        is_after_frozen = channel == LARGEST and self._frozen is not None
        (self._after_frozen if is_after_frozen else self._agreed[channel]).extend(tasks)
        self._received += len(tasks)
        self._digest = digest

    # --- rank 0 ---

    def _offered(self, decider: OrderLeader, rank: int, key: LaunchKey, freezes: int) -> None:
        # Ignore the offer of a task that the static order launches, sent before its rank knew of the last freeze. Such an offer
        # may arrive even after the freeze has ended. A rank that knew of the freeze and yet offers the task has seen the end of
        # the freeze before rank 0, so its offer counts.
        if self._last_frozen is not None and self._last_frozen.covers(key) and freezes < self._freezes:
            return
        if not decider.offer(rank, key):
            return
        task = self._ready[key]
        order = self._pattern.became_ready(task) if self._pattern is not None else None
        if order is not None and self._frozen is None and decider.is_largest(key.group) and key.group in self._may_freeze:
            keys = [LaunchKey(key.group, key.step, *place) for place in order]
            self._outgoing.append(Freeze(keys, self._digest_of(keys)))
            self._freeze(StaticOrder(key.group, key.step, order, self._credits[LARGEST], self._describe))
            return
        del self._ready[key]
        decider.add(task, ahead=self._frozen is None)

    def _decide(self, decider: OrderLeader, channel: int) -> None:
        first, tasks = decider.decided, decider.decide(channel, self._credits[channel])
        if not tasks:
            return
        self._agreed[channel].extend(tasks)
        if self._pattern is not None:
            for task in tasks:
                self._pattern.launched(LaunchKey.of(task))
        if len(self._launchers) > 1:
            self._outgoing.append(Launch(channel, first, [LaunchKey.of(task) for task in tasks], decider.digest))

    # --- a frozen order ---

    @property
    def is_static(self) -> bool:
        """Whether this rank uses a frozen order now."""
        return self._frozen is not None

    @property
    def static_group(self) -> int | None:
        """The group whose order is frozen now on this rank."""
        frozen = self._frozen
        return frozen.group if frozen is not None else None

    def _thaw(self, group: int) -> None:
        if self._frozen is not None and self._frozen.group == group:
            self._frozen = None
            self._static_digests.clear()
            self._begin_after_frozen()

    def _freeze(self, frozen: StaticOrder) -> None:
        self._frozen = self._last_frozen = frozen
        self._freezes += 1
        self._asked = self._unwanted = False
        self._offers = [key for key in self._offers if not frozen.covers(key)]
        self._collecting = {key for key in self._collecting if not frozen.covers(key)}
        self._to_collect = [task for task in self._to_collect if not frozen.covers(LaunchKey.of(task))]
        if self._decider is not None:
            self._decider.forget(frozen.covers)
            self._decider.end_ahead()
        for rank, steps in self._last_steps.items():
            if frozen.group in steps:
                frozen.leave(rank, *steps[frozen.group])
        for key in [key for key in self._ready if frozen.covers(key)]:
            frozen.add(self._ready.pop(key))

    def _digest_of(self, keys: Sequence[LaunchKey]) -> str:
        """The digest of a whole step's launches, by this rank's plan."""
        digest = EMPTY
        for key in keys:
            digest = extend_digest_by_text(digest, f"{key} {self._locate(key)}")
        return digest

    def _follow_freeze(self, keys: list[LaunchKey], digest: str) -> None:
        if self._is_led and keys and self._is_over(*keys[0][:2]):
            return  # and its bytes may be those of another plan
        if self._digest_of(keys) != digest or len({(key.group, key.step) for key in keys}) != 1:
            self._outgoing.append(FreezeRefused(keys))  # rank 0 raises an error with both tensors
            return
        group, first_step = keys[0].group, keys[0].step
        order = [(key.partition, key.verb) for key in keys]
        frozen = StaticOrder(group, first_step, order, self._credits[LARGEST], self._describe)
        if self._is_led:
            # This rank may have contributed to these steps already, without waiting for the message.
            step, entries = self._contributed[group]
            if step >= first_step:
                frozen.resume(step, entries)
        self._freeze(frozen)

    def _is_over(self, group: int, first_step: int) -> bool:
        """Whether this rank, which is led, has released ``group`` or changed its plan since ``first_step``."""
        return group not in self._contributed or first_step <= self._contributed_before.get(group, -1)

    def _refused_freeze(self, rank: int, keys: Sequence[LaunchKey]) -> None:
        """Raise OrderMismatch about ``rank``, which received another order, or whose plan has other bytes in these places."""
        frozen = self._last_frozen
        wanted = [] if frozen is None else [LaunchKey(frozen.group, frozen.first_step, *place) for place in frozen.order]
        for theirs, ours in zip_longest(keys, wanted):
            if theirs != ours:
                what, instead = (self._describe(key) if key is not None else "nothing" for key in (theirs, ours))
                raise OrderMismatch(f"rank {rank} would launch {what} where the static order of rank 0 has {instead}")
        raise OrderMismatch(f"rank {rank} has cut its tensors differently from rank 0: {self._describe(wanted[0])} or another")

    def _static_step_ended(self, frozen: StaticOrder, step: int, digest: str) -> None:
        if self._decider is not None:
            self._confirm_static(0, step, digest)
        elif not self._is_led:
            self._outgoing.append(StaticStep(step, digest, self._freezes))

    def _confirm_static(self, rank: int, step: int, digest: str) -> None:
        if self._frozen is None:
            return  # a change of configuration has ended the frozen order meanwhile
        digests = self._static_digests.setdefault(step, {})
        digests[rank] = digest
        for other, theirs in digests.items():
            if theirs != digest:
                partition, verb = self._frozen.order[0]
                what = self._describe(LaunchKey(self._frozen.group, step, partition, verb))
                raise OrderMismatch(
                    f"ranks {other} and {rank} launched different tasks in the static order that begins with {what}"
                )
        if len(digests) == len(self._launchers):
            del self._static_digests[step]

    def _rank_leaves(self, rank: int, last: Sequence[tuple[int, int, int]]) -> None:
        steps = {group: (step, launched) for group, step, launched in last}
        self._last_steps[rank] = steps
        if self._frozen is not None and rank != self._rank and self._frozen.group in steps:
            self._frozen.leave(rank, *steps[self._frozen.group])
