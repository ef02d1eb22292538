"""AgreedOrder: all ranks start the same tasks in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..errors import OrderMismatch, PeerLost, ProtocolError
from ..scheduler import Policy
from ..task import CommTask
from .decider import Decider, keys_of, left_behind
from .frozen import Frozen
from .key import EMPTY, Key, roll, roll_text
from .pattern import Pattern

#: The channel of launches that were agreed on one by one, and that of a frozen order: neither waits for the other's.
AGREED, STATIC = 0, 1

#: Values, JSON, for ``Messenger.tell`` (to rank 0) or ``announce`` (from rank 0).
Message = dict[str, Any]


class AgreedOrder:
    """Launches what rank 0 decided on (:class:`~.decider.Decider`), in that order; see ``order.Order``. Pure.

    Ranks tell rank 0 what is ready, and with it what they have launched since they told it last; rank 0 announces launches. An
    announcement carries the digest of all launches up to its end, of which each rank makes its own before it launches anything.

    Args:
        freeze: once an order has repeated itself for some steps it is launched without messages (:class:`~.frozen.Frozen`),
            on a channel of its own, until the configuration changes.
        describe: names a task, for messages.
        locate: the bytes that a task covers, of its group's plan here; empty if there is none such.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        policy: Policy,
        credit_bytes: int,
        *,
        freeze: bool = False,
        describe: Callable[[Key], str] = str,
        locate: Callable[[Key], str] = str,
    ) -> None:
        self._rank = rank
        self._policy = policy
        self._credit_bytes = credit_bytes
        self._describe = describe
        self._locate = locate
        self._ready: dict[Key, CommTask] = {}  # ready here, and its launch not yet agreed on
        self._agreed: deque[CommTask] = deque()  # to be started, in this order
        self._sequences = {AGREED: 0, STATIC: 0}
        self._received = 0  # places of the agreed order known here
        self._digest = EMPTY  # of all launches up to there
        self._unconfirmed: list[Key] = []  # the last of them, that rank 0 was not yet told of
        self._offers: list[Key] = []  # ready here, and not yet told
        self._outgoing: list[Message] = []
        self._frozen: Frozen | None = None
        self._last_frozen: Frozen | None = None  # the same, or what it was before it ended
        self._freezes = 0  # how many there were
        self._asked = False  # for an end of it
        self._decider = Decider(world_size, policy, credit_bytes, describe) if rank == 0 else None
        self._pattern = Pattern() if rank == 0 and freeze else None
        self._static_digests: dict[int, dict[int, str]] = {}  # rank 0: of static steps, by rank
        self._world_size = world_size
        self._left: set[int] = set()
        self._last_steps: dict[int, dict[int, tuple[int, int]]] = {}  # of ranks that left, by group: see ``Frozen.leave``

    # --- order.Order ---

    def add(self, task: CommTask) -> int:
        """See ``order.Order``.

        Raises:
            PeerLost: a rank that it needs has left, of which an agreement has to come.
        """
        key = Key.of(task)
        if self._frozen is not None and self._frozen.covers(key):
            self._frozen.add(task)
        else:
            self._ready[key] = task
            if self._decider is not None:
                self._offered(self._decider, 0, key, self._freezes)
            elif 0 in self._left:
                raise left_behind(0, self._describe(key))
            else:
                self._offers.append(key)
        return self._policy.key(task)

    def next(self) -> CommTask | None:
        if self._agreed:
            return self._started(self._agreed.popleft(), AGREED)
        frozen = self._frozen
        task = frozen.next() if frozen is not None else None
        if frozen is None or task is None:
            return None
        if (done := frozen.end_step()) is not None:
            self._static_step_ended(frozen, *done)
        return self._started(task, STATIC)

    def _started(self, task: CommTask, channel: int) -> CommTask:
        task.channel, task.sequence = channel, self._sequences[channel]
        self._sequences[channel] += 1
        return task

    def sent(self, task: CommTask) -> None:
        if task.channel == STATIC:
            if self._frozen is not None and self._frozen.group == task.group:
                self._frozen.sent(task)
        elif self._decider is not None:
            self._decider.scheduler.sent(task)
            self._decide(self._decider)

    def reconfigure(self, policy: Policy, credit_bytes: int) -> None:
        self._policy, self._credit_bytes = policy, credit_bytes
        if self._decider is not None:
            self._decider.scheduler.reconfigure(policy, credit_bytes)
            self._decide(self._decider)

    # --- what else Core tells ---

    def add_group(self, group: int, nbytes: int) -> None:
        """There is a group, of that many bytes; added before its first task."""
        if self._pattern is not None:
            self._pattern.add_group(group, nbytes)

    def release(self, group: int) -> None:
        """``group`` has had its last step."""
        self._thaw(group)
        if self._pattern is not None:
            self._pattern.release(group)
        if self._decider is not None:
            self._decider.forget(lambda key: key.group == group)

    def recut(self, group: int) -> None:
        """``group`` begins a step with another plan, the same on every rank: what was frozen does not fit it any more. Nothing
        of the group is outstanding."""
        self._thaw(group)
        if self._pattern is not None:
            self._pattern.forget(group)

    def leave(self, rank: int) -> None:
        """``rank`` will launch nothing more.

        Raises:
            PeerLost: something waits for it.
        """
        self._left.add(rank)
        if self._decider is not None:
            self._decider.leave(rank)
        elif rank == 0 and self._ready:
            raise left_behind(0, self._describe(next(iter(self._ready))))

    def farewell(self, first_missing_steps: Mapping[int, int]) -> None:
        """This rank will launch nothing more; of each group, the first step that it does not complete."""
        frozen = self._frozen
        steps = [
            [group, step, frozen.launched(step) if frozen is not None and frozen.group == group else 0]
            for group, step in first_missing_steps.items()
        ]
        self._outgoing.append({"leaves": self._rank, "steps": steps})

    def wants_change(self) -> bool:
        """Whether the frozen order does not fit any more, said once: any agreed change of configuration ends it."""
        if self._frozen is None or not self._frozen.unfit or self._asked:
            return False
        self._asked = True
        return True

    def stuck(self, group: int) -> int:
        """How many tasks of a frozen ``group`` are ready, and wait for one that is before them and is not."""
        return self._frozen.stuck() if self._frozen is not None and self._frozen.group == group else 0

    def in_vain(self, stuck_too: bool = True) -> PeerLost | None:
        """Why waiting for what is outstanding in a frozen order lasts for ever; None if no rank is missing. ``stuck_too``: also
        for what :meth:`stuck` counts."""
        return self._frozen.in_vain(stuck_too) if self._frozen is not None else None

    # --- messages ---

    def outgoing(self) -> list[Message]:
        """What to send now, in order: to rank 0, or from rank 0 to all others."""
        if self._offers:
            ready = [key.to_record() for key in self._offers]
            self._outgoing.append({"ready": ready, "freezes": self._freezes, **self._report()})
            self._offers.clear()
        messages, self._outgoing = self._outgoing, []
        return messages

    def _report(self) -> Message:
        """What was launched here since the last report; what is to start at once, and in order, counts as launched."""
        first = self._received - len(self._unconfirmed)
        report = {"first": first, "launched": [key.to_record() for key in self._unconfirmed], "digest": self._digest}
        self._unconfirmed = []
        return report

    def told(self, rank: int, message: Message) -> None:
        """For rank 0: what ``rank`` told.

        Raises:
            OrderMismatch: it launched something else than rank 0.
            PeerLost: a rank that has left is waited for.
            ProtocolError: no rank tells such a thing.
        """
        decider = self._decider
        if decider is None:
            raise ProtocolError(f"rank {rank} told rank {self._rank} what only rank 0 is told")
        try:
            if "leaves" in message:
                self._outgoing.append(message)  # for the others
                self._rank_leaves(message)
            elif "freeze" in message:
                self._refused_freeze(rank, keys_of(message["freeze"]))
            elif "static" in message:
                self._confirm_static(rank, int(message["static"]), str(message["digest"]))
            else:
                first, launched = int(message["first"]), keys_of(message["launched"])
                if "refused" in message:
                    decider.require_same(rank, first, launched)
                    raise OrderMismatch(
                        f"rank {rank} cannot launch {self._describe(launched[-1])} as rank 0 does: it has it not ready, or has "
                        "cut its tensors differently"
                    )
                decider.confirm(rank, first, launched, str(message["digest"]))
                for key in keys_of(message["ready"]):
                    self._offered(decider, rank, key, int(message["freezes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"rank {rank} told rank 0 what is no message of an order: {error!r}") from error

    def announced(self, message: Message) -> None:
        """What rank 0 announced, for another rank.

        Raises:
            ProtocolError: rank 0 announces no such thing.
        """
        try:
            if "leaves" in message:
                self._rank_leaves(message)
            elif "freeze" in message:
                self._follow_freeze(keys_of(message["freeze"]), str(message["digest"]))
            else:
                self._follow(int(message["first"]), keys_of(message["launch"]), str(message["digest"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"rank 0 announced what is no message of an order: {error!r}") from error

    def _follow(self, first: int, keys: list[Key], digest: str) -> None:
        mine, tasks = self._digest, []
        for key in keys:
            task = self._ready.get(key)
            if task is None:
                break
            mine = roll(mine, task)
            tasks.append(task)
        if first != self._received or len(tasks) < len(keys) or len(set(keys)) < len(keys) or mine != digest:
            # Nothing of it is launched: rank 0, which knows what it said, names both tensors.
            self._outgoing.append({"first": first, "launched": [key.to_record() for key in keys], "refused": True})
            return
        for task in tasks:
            del self._ready[Key.of(task)]
        self._agreed.extend(tasks)
        self._received += len(tasks)
        self._unconfirmed += keys
        self._digest = digest

    # --- rank 0 ---

    def _offered(self, decider: Decider, rank: int, key: Key, freezes: int) -> None:
        # A rank that knows of the last freeze, and offers what is frozen here, has seen its end before rank 0. One that does
        # not know of it may be heard after its end.
        if self._last_frozen is not None and self._last_frozen.covers(key) and freezes < self._freezes:
            return
        if not decider.offer(rank, key):
            return
        task = self._ready[key]
        order = self._pattern.became_ready(task) if self._pattern is not None else None
        if order is not None and self._frozen is None:
            keys = [Key(key.group, key.step, *place) for place in order]
            self._outgoing.append({"freeze": [each.to_record() for each in keys], "digest": self._digest_of(keys)})
            self._freeze(Frozen(key.group, key.step, order, self._credit_bytes, self._describe))
            return
        del self._ready[key]
        decider.scheduler.add(task)
        self._decide(decider)

    def _decide(self, decider: Decider) -> None:
        first, tasks = decider.decided, decider.decide()
        if not tasks:
            return
        self._agreed.extend(tasks)
        if self._pattern is not None:
            for task in tasks:
                self._pattern.launched(Key.of(task))
        if self._world_size > 1:
            keys = [Key.of(task).to_record() for task in tasks]
            last = self._outgoing[-1] if self._outgoing else {}
            if "launch" in last:  # not sent yet: one message for both
                last["launch"] += keys
                last["digest"] = decider.digest
            else:
                self._outgoing.append({"first": first, "launch": keys, "digest": decider.digest})

    # --- a frozen order ---

    @property
    def is_static(self) -> bool:
        """Whether there is one, here."""
        return self._frozen is not None

    def _thaw(self, group: int) -> None:
        if self._frozen is not None and self._frozen.group == group:
            self._frozen = None
            self._static_digests.clear()

    def _freeze(self, frozen: Frozen) -> None:
        self._frozen = self._last_frozen = frozen
        self._freezes += 1
        self._asked = False
        self._offers = [key for key in self._offers if not frozen.covers(key)]
        if self._decider is not None:
            self._decider.forget(frozen.covers)
        for rank, steps in self._last_steps.items():
            if frozen.group in steps:
                frozen.leave(rank, *steps[frozen.group])
        for key in [key for key in self._ready if frozen.covers(key)]:
            frozen.add(self._ready.pop(key))

    def _digest_of(self, keys: Sequence[Key]) -> str:
        """Of a whole step, by this rank's plan."""
        digest = EMPTY
        for key in keys:
            digest = roll_text(digest, f"{key} {self._locate(key)}")
        return digest

    def _follow_freeze(self, keys: list[Key], digest: str) -> None:
        if self._digest_of(keys) != digest or len({(key.group, key.step) for key in keys}) != 1:
            self._outgoing.append({"freeze": [key.to_record() for key in keys]})  # rank 0 names both tensors
            return
        order = [(key.partition, key.verb) for key in keys]
        self._freeze(Frozen(keys[0].group, keys[0].step, order, self._credit_bytes, self._describe))

    def _refused_freeze(self, rank: int, keys: Sequence[Key]) -> None:
        """``rank`` has heard of another order, or its plan has other bytes at these places."""
        frozen = self._last_frozen
        wanted = [] if frozen is None else [Key(frozen.group, frozen.first_step, *place) for place in frozen.order]
        for theirs, ours in zip_longest(keys, wanted):
            if theirs != ours:
                what, instead = (self._describe(key) if key is not None else "nothing" for key in (theirs, ours))
                raise OrderMismatch(f"rank {rank} would launch {what} where the static order of rank 0 has {instead}")
        raise OrderMismatch(f"rank {rank} has cut its tensors differently from rank 0: {self._describe(wanted[0])} or another")

    def _static_step_ended(self, frozen: Frozen, step: int, digest: str) -> None:
        if self._decider is not None:
            self._confirm_static(0, step, digest)
        else:
            self._outgoing.append({"static": step, "digest": digest})

    def _confirm_static(self, rank: int, step: int, digest: str) -> None:
        if self._frozen is None:
            return  # a change of configuration has ended it since
        digests = self._static_digests.setdefault(step, {})
        digests[rank] = digest
        for other, theirs in digests.items():
            if theirs != digest:
                partition, verb = self._frozen.order[0]
                what = self._describe(Key(self._frozen.group, step, partition, verb))
                raise OrderMismatch(
                    f"ranks {other} and {rank} launched different tasks in the static order that begins with {what}"
                )
        if len(digests) == self._world_size:
            del self._static_digests[step]

    def _rank_leaves(self, message: Message) -> None:
        rank = int(message["leaves"])
        steps = {int(group): (int(step), int(launched)) for group, step, launched in message["steps"]}
        self._last_steps[rank] = steps
        if self._frozen is not None and rank != self._rank and self._frozen.group in steps:
            self._frozen.leave(rank, *steps[self._frozen.group])
