from __future__ import annotations

from typing import Any

from commsched.plugins.common.undo import Undo


class Values:
    """Parameters that an update increments."""

    def __init__(self) -> None:
        self.of = {"a": 0, "b": 0}
        self.memory: list[Any] = []
        self.undo: Undo[str] = Undo(self._save, self._restore)

    def _save(self, key: str, memory: list[int] | None) -> list[int]:
        self.memory.append(memory)
        if memory is None:
            return [self.of[key]]
        memory[0] = self.of[key]
        return memory

    def _restore(self, key: str, copied: list[int]) -> None:
        [self.of[key]] = copied

    def update(self, *keys: str) -> None:
        self.undo.before_update(keys)
        for key in keys:
            self.of[key] += 1
        self.undo.after_update()


def test_a_step_of_which_one_update_is_made_is_taken_back() -> None:
    values = Values()
    for step in range(3):
        values.undo.begin_step(step)
        values.undo.committed()
        values.update("a", "b")
    values.undo.begin_step(3)
    values.undo.committed()
    values.update("b")
    values.undo.begin_step(4)
    assert values.undo.steps(is_outstanding=True) == 3
    values.undo.take_back(3)
    assert values.of == {"a": 3, "b": 3}
    assert values.undo.steps(is_outstanding=False) == 3


def test_a_result_whose_updates_are_made_stays() -> None:
    values = Values()
    values.undo.committed()
    values.update("a", "b")
    values.undo.begin_step(1)
    assert values.undo.steps(is_outstanding=False) == 1
    values.undo.take_back(1)
    assert values.of == {"a": 1, "b": 1}


def test_a_step_that_the_loop_has_not_ended_is_taken_back_although_its_updates_are_made() -> None:
    values = Values()
    values.undo.committed()
    values.update("a", "b")
    assert values.undo.steps(is_outstanding=False) == 0
    values.undo.take_back(0)
    assert values.of == {"a": 0, "b": 0}


def test_several_updates_of_one_step_are_taken_back_together() -> None:
    values = Values()
    for _ in range(2):
        values.undo.committed()
        values.update("a")
    values.undo.take_back(0)
    assert values.of["a"] == 0


def test_an_update_that_was_broken_off_counts_as_outstanding() -> None:
    values = Values()
    values.undo.committed()
    values.undo.begin_step(1)
    values.undo.before_update(["a"])
    assert values.undo.steps(is_outstanding=False) == 0


def test_copies_use_their_memory_again_and_old_ones_are_not_put_back() -> None:
    values = Values()
    for step in range(2):
        values.undo.begin_step(step)
        values.undo.committed()
        values.update("a")
    assert values.memory[0] is None
    assert values.memory[1] is not None
    values.undo.begin_anew(1)
    values.of["a"] = 7
    values.undo.take_back(1)
    assert values.of["a"] == 7
    values.undo.committed()
    values.update("a")
    values.undo.take_back(1)
    assert values.of["a"] == 7


def test_copies_are_made_as_long_as_the_thread_would_wait_and_only_once() -> None:
    values = Values()
    values.undo.committed()
    waits = iter([True, False])
    values.undo.copy_while(lambda: next(waits), ["a", "b"])
    assert len(values.memory) == 1
    assert values.undo.steps(is_outstanding=True) == 0  # no update is begun by that
    values.update("a", "b")
    assert len(values.memory) == 2
    values.undo.take_back(0)
    assert values.of == {"a": 0, "b": 0}


def test_a_copy_whose_update_is_never_made_changes_nothing() -> None:
    values = Values()
    for step in range(2):
        values.undo.begin_step(step)
        values.undo.committed()
        values.undo.copy_while(lambda: True, ["a", "b"])
        values.update(*["a", "b"][: 2 - step])
    values.undo.begin_step(2)
    values.undo.take_back(1)
    assert values.of == {"a": 1, "b": 1}


def test_a_result_is_kept_while_another_one_replaces_it() -> None:
    values = Values()
    values.undo.committed()
    values.update("a", "b")
    values.undo.take_back(0)
    for _ in range(2):  # the second one is lost while it gives its result, too
        values.undo.keep(["a", "b"])
        values.of["a"] = 7
        values.undo.take_back(0)
        assert values.of == {"a": 0, "b": 0}
    values.undo.keep(["a", "b"])
    values.of["a"] = 7
    values.undo.begin_anew(1)
    values.undo.take_back(1)
    assert values.of == {"a": 7, "b": 0}


class WithoutCopies(Values):
    def __init__(self) -> None:
        super().__init__()
        self.undo = Undo(None, self._restore)


def test_without_copies_there_is_a_result_before_the_first_update_of_a_step_and_after_the_last() -> None:
    values = WithoutCopies()
    assert values.undo.steps(is_outstanding=False) == 0
    values.undo.committed()
    assert values.undo.steps(is_outstanding=True) == 0
    values.update("a")
    assert values.undo.steps(is_outstanding=True) is None
    values.update("b")
    assert values.undo.steps(is_outstanding=False) is None  # the loop has not ended the step
    values.undo.begin_step(1)
    assert values.undo.steps(is_outstanding=False) == 1
    values.undo.committed()
    values.undo.begin_step(2)
    assert values.undo.steps(is_outstanding=True) == 1
    values.undo.before_update([])  # of nothing, such as a layer without parameters
    values.undo.after_update()
    assert values.undo.steps(is_outstanding=True) == 1
    values.undo.before_update(["a"])
    assert values.undo.steps(is_outstanding=False) is None  # broken off


def test_without_copies_a_result_goes_when_another_one_replaces_it() -> None:
    values = WithoutCopies()
    values.undo.committed()
    values.undo.take_back(0)
    assert not values.undo.keep(["a", "b"])
    values.undo.begin_anew(3)
    assert values.undo.steps(is_outstanding=False) == 3
    values.undo.committed()
    values.undo.copy_while(lambda: True, ["a", "b"])
    assert values.undo.steps(is_outstanding=True) == 3
    assert values.memory == []
