from __future__ import annotations

import math

import pytest

from commsched.control.generations import (
    HOLDERS_LOST,
    NONE_BEGUN,
    NONE_LEFT,
    NOTHING_KEPT,
    Action,
    Asked,
    Dismiss,
    Form,
    Generations,
    GiveUp,
    Kill,
    Start,
    Summon,
)

DONE = Asked(9, is_over=True, is_done=True)


def start(job: Generations, member: int, rank: int, now: float) -> None:
    job.wanted(member, rank, now)
    assert job.started(member, now) == rank


def formed(ranks: int, min_ranks: int | None = None, max_restarts: int = 0, replace_within: float = math.inf) -> Generations:
    """The first generation: member n is rank n."""
    job = Generations(ranks if min_ranks is None else min_ranks, max_restarts, 60.0, replace_within)
    for rank in range(ranks):
        start(job, rank, rank, 0.0)
    actions: list[Action] = []
    for rank in range(ranks):
        assert actions == []
        actions = job.asked(rank, Asked(), 1.0)
    assert actions == [Form(1, {rank: rank for rank in range(ranks)}, 0, 0)]
    return job


def test_a_lost_rank_is_replaced_in_its_place_and_the_root_has_the_most_steps() -> None:
    job = formed(3, max_restarts=1)
    assert job.asked(2, Asked(7), 5.0) == []  # before its end is known
    assert job.ended(0, well=False) == [Start(0)]
    start(job, 3, 0, 5.0)
    assert job.asked(1, Asked(6), 5.0) == []
    assert job.asked(3, Asked(), 6.0) == [Form(2, {3: 0, 1: 1, 2: 2}, 2, 7)]
    assert job.restarts_left == 0


def test_of_equal_ones_the_first_rank_is_the_root() -> None:
    job = formed(3, min_ranks=2)
    job.ended(0, well=False)
    job.asked(2, Asked(4), 5.0)
    assert job.asked(1, Asked(4), 5.0) == [Form(2, {1: 0, 2: 1}, 0, 4)]


def test_without_restarts_the_others_are_counted_anew_down_to_the_least_number() -> None:
    job = formed(4, min_ranks=2)
    job.ended(1, well=False)
    for member in (0, 2):
        assert job.asked(member, Asked(3), 5.0) == []
    assert job.asked(3, Asked(3), 5.0) == [Form(2, {0: 0, 2: 1, 3: 2}, 0, 3)]
    job.ended(0, well=False)
    job.asked(2, Asked(5), 5.0)
    assert job.asked(3, Asked(6), 5.0) == [Form(3, {2: 0, 3: 1}, 1, 6)]
    assert job.ended(3, well=False) == [GiveUp("1 rank is left, fewer than --min 2, and no restart (--max-restarts)")]
    assert job.asked(2, Asked(6), 5.0) == [GiveUp("1 rank is left, fewer than --min 2, and no restart (--max-restarts)")]


def test_who_is_awaited_in_vain_is_not_among_those_that_are_left() -> None:
    job = formed(4, min_ranks=4, max_restarts=1)
    assert job.ended(2, well=False) == [Start(2)]
    job.wanted(4, 2, 5.0)
    assert job.ended(3, well=False) == [GiveUp("2 ranks are left, fewer than --min 4, and no restart (--max-restarts)")]


def test_a_rank_that_leaves() -> None:
    job = formed(3, min_ranks=2, max_restarts=1)
    assert job.asked(1, Asked(leaves=True), 5.0) == [Dismiss(1), Start(1)]
    assert job.ended(1, well=True) == []
    start(job, 3, 1, 5.0)
    for member in (0, 2):
        job.asked(member, Asked(6), 5.0)
    assert job.asked(3, Asked(), 6.0) == [Form(2, {0: 0, 3: 1, 2: 2}, 0, 6)]
    assert job.asked(0, Asked(leaves=True), 7.0) == [Dismiss(0)]
    job.asked(2, Asked(7), 7.0)
    assert job.asked(3, Asked(7), 7.0) == [Form(3, {3: 0, 2: 1}, 0, 7)]


def grown(min_ranks: int = 2, max_restarts: int = 1) -> Generations:
    """Member 3 is to replace member 1, and the other two have gone on without it."""
    job = formed(3, min_ranks, max_restarts, replace_within=10.0)
    assert job.ended(1, well=False) == [Start(1)]
    start(job, 3, 1, 5.0)
    job.asked(0, Asked(4), 5.0)
    assert job.tick(16.0) == []  # member 2 may be in a long call
    job.asked(2, Asked(4), 12.0)
    assert job.tick(14.9) == []
    assert job.tick(15.1) == [Form(2, {0: 0, 2: 1}, 0, 4)]
    return job


def test_a_replacement_that_comes_late_is_joined_by_the_others() -> None:
    job = grown()
    assert job.asked(3, Asked(), 20.0) == [Summon(0), Summon(2)]
    assert job.asked(2, Asked(7), 21.0) == []
    assert job.asked(0, Asked(6), 21.0) == [Form(3, {0: 0, 2: 1, 3: 2}, 1, 7)]
    assert job.restarts_left == 0


def test_a_replacement_that_comes_while_others_have_lost_another_rank() -> None:
    job = grown(max_restarts=2)
    assert job.ended(0, well=False) == [Start(0)]
    start(job, 4, 0, 20.0)
    job.asked(2, Asked(6), 20.0)
    assert job.asked(3, Asked(), 20.0) == []
    assert job.asked(4, Asked(), 21.0) == [Form(3, {4: 0, 2: 1, 3: 2}, 1, 6)]


def test_a_replacement_that_never_comes() -> None:
    job = grown(max_restarts=2)
    assert job.tick(64.0) == []
    assert job.tick(66.0) == [Kill(3, "it did not join within 60 s")]
    assert job.ended(3, well=False) == [Start(1)]
    start(job, 4, 1, 66.0)
    assert job.asked(4, Asked(), 70.0) == [Summon(0), Summon(2)]
    job = grown(max_restarts=1)
    job.tick(66.0)
    assert job.ended(3, well=False) == []  # the others go on as they are
    assert job.asked(0, DONE, 90.0) == [Dismiss(0)]


def test_a_replacement_that_is_late_for_all_steps() -> None:
    job = grown()
    assert job.asked(0, DONE, 20.0) == [Kill(3, "all steps are made"), Dismiss(0)]
    assert job.ended(3, well=False) == []
    assert job.asked(2, DONE, 20.0) == [Dismiss(2)]


def test_too_few_ranks_wait_for_a_late_one() -> None:
    job = grown()
    assert job.ended(2, well=False) == []  # two live, and may go on once the late one has come
    assert job.asked(0, Asked(6), 20.0) == []
    assert job.tick(40.0) == []
    assert job.asked(3, Asked(), 41.0) == [Form(3, {0: 0, 3: 1}, 0, 6)]


def test_a_new_process_that_another_loss_ends_costs_no_restart() -> None:
    job = formed(3, max_restarts=2)
    assert job.ended(1, well=False) == [Start(1)]
    start(job, 3, 1, 5.0)
    for member in (0, 2, 3):
        job.asked(member, Asked(None if member == 3 else 4), 5.0)
    assert job.ended(0, well=False) == [Start(0)]
    assert job.ended(3, well=False, is_consequence=True) == [Start(1)]
    assert job.restarts_left == 0
    start(job, 4, 0, 6.0)
    start(job, 5, 1, 6.0)
    for member in (2, 4):
        job.asked(member, Asked(4 if member == 2 else None), 6.0)
    assert job.asked(5, Asked(), 6.0) == [Form(3, {4: 0, 5: 1, 2: 2}, 2, 4)]


def test_a_new_process_that_dies_is_replaced_as_well() -> None:
    job = formed(2, max_restarts=2)
    assert job.ended(1, well=False) == [Start(1)]
    start(job, 2, 1, 5.0)
    job.asked(0, Asked(3), 5.0)
    assert job.ended(2, well=False) == [Start(1)]
    start(job, 3, 1, 6.0)
    assert job.asked(3, Asked(), 7.0) == [Form(2, {0: 0, 3: 1}, 0, 3)]


def test_a_rank_whose_values_were_being_replaced_is_no_root() -> None:
    job = formed(3, max_restarts=5)
    job.ended(2, well=False)
    start(job, 3, 2, 5.0)
    job.asked(0, Asked(None), 5.0)
    job.asked(3, Asked(), 5.0)
    assert job.asked(1, Asked(3), 5.0) == [Form(2, {0: 0, 1: 1, 3: 2}, 1, 3)]


def test_without_any_rank_that_has_the_state_the_job_ends() -> None:
    job = formed(2, max_restarts=5)
    assert job.ended(0, well=False) == [Start(0)]
    start(job, 2, 0, 5.0)
    assert job.ended(1, well=False) == [GiveUp(NONE_LEFT)]


def test_if_all_ranks_have_lost_each_other_before_the_first_step_the_job_ends() -> None:
    job = formed(2, max_restarts=5)
    job.ended(0, well=False)
    start(job, 2, 0, 5.0)
    job.asked(2, Asked(), 5.0)
    assert job.asked(1, Asked(None), 5.0) == [GiveUp(NONE_BEGUN)]


def test_the_root_is_lost_while_it_gives_its_result_and_the_next_survivor_is_the_root() -> None:
    job = formed(3, max_restarts=5)
    job.ended(2, well=False)
    start(job, 3, 2, 5.0)
    for member, steps in ((0, 4), (1, 4), (3, None)):
        actions = job.asked(member, Asked(steps), 5.0)
    assert actions == [Form(2, {0: 0, 1: 1, 3: 2}, 0, 4)]
    assert job.ended(0, well=False) == [Start(0)]
    assert job.ended(3, well=False, is_consequence=True) == [Start(2)]  # it had a part of the result only
    start(job, 4, 0, 6.0)
    start(job, 5, 2, 6.0)
    for member, steps in ((1, 4), (4, None), (5, None)):
        actions = job.asked(member, Asked(steps), 7.0)
    assert actions == [Form(3, {4: 0, 1: 1, 5: 2}, 1, 4)]


def test_the_only_rank_with_a_result_is_lost_while_it_gives_it() -> None:
    job = formed(2, max_restarts=5)
    job.ended(1, well=False)
    start(job, 2, 1, 5.0)
    job.asked(0, Asked(4), 5.0)
    assert job.asked(2, Asked(), 5.0) == [Form(2, {0: 0, 2: 1}, 0, 4)]
    assert job.asked(2, Asked(None, lost=0), 6.0) == []
    assert job.ended(0, well=False) == [GiveUp(HOLDERS_LOST)]


def test_a_job_that_keeps_nothing_goes_on_from_a_rank_that_has_a_result() -> None:
    job = formed(3, max_restarts=1)
    assert job.ended(2, well=False) == [Start(2)]
    start(job, 3, 2, 5.0)
    assert job.asked(0, Asked(None, keeps_nothing=True), 5.0) == []
    assert job.asked(1, Asked(4), 5.0) == []
    assert job.asked(3, Asked(), 6.0) == [Form(2, {0: 0, 1: 1, 3: 2}, 1, 4)]


def test_if_no_rank_has_one_the_job_ends_at_once_and_the_message_says_why() -> None:
    job = formed(3, max_restarts=1)
    assert job.ended(2, well=False) == [Start(2)]
    assert job.asked(0, Asked(None, keeps_nothing=True), 5.0) == []
    assert job.asked(1, Asked(None, keeps_nothing=True), 5.0) == [GiveUp(NOTHING_KEPT)]  # the new process need not come


def test_ranks_that_lost_each_other_go_on_and_that_counts() -> None:
    job = formed(2, max_restarts=1)
    job.asked(0, Asked(3), 5.0)
    assert job.asked(1, Asked(3), 5.0) == [Form(2, {0: 0, 1: 1}, 0, 3, is_again=True)]
    job.asked(0, Asked(3), 6.0)
    assert job.asked(1, Asked(3), 6.0) == [GiveUp("the ranks lost each other, and no restart is left")]


def test_a_silent_rank_is_killed_unless_it_has_asked() -> None:
    job = formed(3, max_restarts=1)
    assert job.asked(0, Asked(3, lost=1, was_silent=True), 5.0) == [Kill(1, "it was silent")]
    assert job.ended(1, well=False) == [Start(1)]
    job = formed(3, max_restarts=1)
    assert job.asked(1, Asked(3), 5.0) == []
    assert job.asked(0, Asked(3, lost=1, was_silent=True), 5.0) == []


def test_a_rank_that_others_have_lost_is_killed_if_it_neither_ends_nor_asks() -> None:
    job = formed(3, max_restarts=1)
    assert job.asked(0, Asked(3, lost=1), 5.0) == []
    assert job.asked(2, Asked(3, lost=1), 8.0) == []
    assert job.tick(9.9) == []
    assert job.tick(10.1) == [Kill(1, "it has failed, and does not end")]
    assert job.tick(10.2) == []
    assert job.ended(1, well=False) == [Start(1)]
    job = formed(3, max_restarts=1)
    job.asked(0, Asked(3, lost=1), 5.0)
    job.asked(1, Asked(3), 6.0)
    assert job.tick(100.0) == []


def test_members_that_do_not_ask() -> None:
    job = formed(3, max_restarts=1)
    assert job.awaited(100.0, 5.0) == []  # nobody waits
    job.asked(0, Asked(3), 100.0)
    assert job.awaited(104.0, 5.0) == []
    assert job.awaited(106.0, 5.0) == [1, 2]
    job.ended(1, well=False)
    start(job, 3, 1, 100.0)
    assert job.tick(159.0) == []
    assert job.tick(161.0) == [Kill(3, "it did not join within 60 s")]
    assert job.awaited(161.0, 5.0) == [2]


def test_ranks_that_do_not_join_at_first_end_the_job() -> None:
    job = Generations(2, 3, join_within_seconds=60.0)
    for rank in range(3):
        start(job, rank, rank, 0.0)
    assert job.tick(1000.0) == []  # nobody has joined: it may be a script that never does
    job.asked(1, Asked(), 1000.0)
    assert job.tick(1061.0) == [GiveUp("ranks 0, 2 did not join within 60 s")]


@pytest.mark.parametrize("well", [True, False])
def test_a_rank_that_ends_before_all_have_joined_ends_the_job(well: bool) -> None:
    job = Generations(2, 3, join_within_seconds=60.0)
    for rank in range(2):
        start(job, rank, rank, 0.0)
    job.asked(0, Asked(), 1.0)
    why = "a rank has ended without joining the job" if well else "rank 1 has ended before all ranks had joined"
    assert job.ended(1, well) == [GiveUp(why)]


def test_processes_that_never_join_may_end() -> None:
    job = Generations(2, 3, join_within_seconds=60.0)
    for rank in range(2):
        start(job, rank, rank, 0.0)
    assert job.ended(0, well=True) == []
    assert job.ended(1, well=True) == []


def test_a_loss_after_the_last_step() -> None:
    job = formed(3, max_restarts=1)
    assert job.ended(1, well=False) == [Start(1)]
    start(job, 3, 1, 5.0)
    job.asked(0, Asked(9, is_over=True), 5.0)
    job.asked(3, Asked(), 5.0)
    assert job.asked(2, Asked(9, is_over=True), 5.0) == [Form(2, {0: 0, 3: 1, 2: 2}, 0, 9)]


AFTER_THE_LAST = GiveUp("a rank has failed after the last step")


def test_all_that_have_made_all_steps_are_dismissed() -> None:
    job = formed(3, max_restarts=1)
    assert job.asked(2, Asked(9, is_over=True), 5.0) == []  # it could not hear that all have
    assert job.asked(0, DONE, 5.0) == [Dismiss(2), Dismiss(0)]
    assert job.asked(1, DONE, 5.0) == [Dismiss(1)]
    assert [job.ended(member, well=True) for member in (0, 1, 2)] == [[], [], []]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_is_lost_after_the_last_step_is_not_replaced(order: tuple[int, int]) -> None:
    job = formed(3, max_restarts=1)
    if order == (0, 1):
        job.asked(0, DONE, 5.0)
        assert job.ended(1, well=False) == [GiveUp("rank 1 has failed after the last step")]
    else:
        assert job.ended(1, well=False) == [Start(1)]
        start(job, 3, 1, 5.0)
        assert job.asked(0, DONE, 5.0) == [AFTER_THE_LAST]
    assert job.is_closed
    assert job.ended(0, well=True) == []


def test_losses_while_others_have_ended() -> None:
    job = formed(3, max_restarts=1)
    assert job.ended(0, well=True) == []
    assert job.ended(1, well=False) == [GiveUp("rank 1 has failed after the last step")]
    job = formed(3, max_restarts=1)
    job.ended(0, well=True)
    why = "rank 1 has further steps to make, and others have made all of theirs"
    assert job.asked(1, Asked(4), 5.0) == [GiveUp(why)]
    assert job.asked(2, Asked(4), 5.0) == [GiveUp(why)]
    assert job.ended(2, well=False) == []


def test_a_process_for_which_no_machine_has_room_is_waited_for_and_then_the_job_ends() -> None:
    job = formed(3, max_restarts=2)
    assert job.ended(1, well=False) == [Start(1)]
    job.wanted(3, 1, 5.0)
    for member in (0, 2):
        assert job.asked(member, Asked(7), 5.0) == []
    assert job.tick(65.0) == []
    assert job.tick(66.0) == [GiveUp("no machine with room for rank 1 has come within 60 s")]


def test_a_machine_that_comes_in_time_has_all_of_the_time_to_join() -> None:
    job = formed(2, max_restarts=1)
    job.ended(1, well=False)
    job.wanted(2, 1, 5.0)
    job.asked(0, Asked(7), 5.0)
    assert job.tick(60.0) == []
    assert job.started(2, 60.0) == 1
    assert job.tick(119.0) == []
    assert job.asked(2, Asked(), 119.0) == [Form(2, {0: 0, 2: 1}, 0, 7)]


def test_without_a_machine_the_others_go_on_and_the_process_joins_them_whenever_one_comes() -> None:
    job = formed(2, min_ranks=1, max_restarts=1, replace_within=10.0)
    job.ended(1, well=False)
    job.wanted(2, 1, 5.0)
    job.asked(0, Asked(7), 5.0)
    assert job.tick(16.0) == [Form(2, {0: 0}, 0, 7)]
    assert job.tick(5000.0) == []
    assert job.started(2, 5000.0) == 1
    assert job.asked(2, Asked(), 5001.0) == [Summon(0)]
    assert job.asked(0, Asked(300), 5001.0) == [Form(3, {0: 0, 2: 1}, 0, 300)]


def test_a_process_without_which_the_others_may_go_on_ends_nothing_while_they_wait() -> None:
    """They wait for it longer than a machine may take to come."""
    job = formed(2, min_ranks=1, max_restarts=1, replace_within=120.0)
    assert job.ended(1, well=False) == [Start(1)]
    job.wanted(2, 1, 5.0)
    assert job.asked(0, Asked(7), 5.0) == []
    assert job.tick(66.0) == []
    assert job.tick(126.0) == [Form(2, {0: 0}, 0, 7)]


def test_nor_does_it_while_one_of_the_others_has_yet_to_ask() -> None:
    job = formed(3, min_ranks=2, max_restarts=1, replace_within=30.0)
    assert job.ended(1, well=False) == [Start(1)]
    job.wanted(3, 1, 5.0)
    assert job.asked(2, Asked(7), 5.0) == []
    assert job.tick(66.0) == []  # rank 0 evaluates, say
    assert job.asked(0, Asked(7), 100.0) == []
    assert job.tick(100.5) == [Form(2, {0: 0, 2: 1}, 0, 7)]


def test_a_process_without_which_too_few_are_left_ends_the_job_if_no_machine_comes() -> None:
    """It was late, and the others went on without it; then another one was lost."""
    job = formed(3, min_ranks=2, max_restarts=1, replace_within=10.0)
    assert job.ended(1, well=False) == [Start(1)]
    job.wanted(3, 1, 5.0)
    job.asked(0, Asked(6), 5.0)
    job.asked(2, Asked(6), 5.0)
    assert job.tick(16.0) == [Form(2, {0: 0, 2: 1}, 0, 6)]
    assert job.tick(500.0) == []  # they train
    assert job.ended(2, well=False) == []
    assert job.asked(0, Asked(9), 600.0) == []
    assert job.tick(659.0) == []
    assert job.tick(661.0) == [GiveUp("no machine with room for rank 1 has come within 60 s")]


def test_several_silent_ranks_are_killed_if_they_neither_end_nor_ask() -> None:
    """The error of who has waited as long as stall_after names no rank then."""
    job = formed(4, max_restarts=2)
    assert job.asked(0, Asked(3, was_silent=True), 5.0) == []
    assert job.asked(1, Asked(3, was_silent=True), 5.0) == []
    assert job.tick(9.9) == []
    assert job.tick(10.1) == [Kill(2, "it has failed, and does not end"), Kill(3, "it has failed, and does not end")]


def test_ranks_for_which_no_machine_has_room_at_first() -> None:
    job = Generations(3, 3, 60.0)
    for rank in range(3):
        job.wanted(rank, rank, 1.0)
    job.started(0, 1.0)
    job.asked(0, Asked(), 2.0)
    assert job.tick(61.0) == []
    assert job.tick(62.0) == [GiveUp("no machine with room for ranks 1, 2 has come within 60 s")]
