"""Reading, keeping, saving and stepping from states."""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import UnsupportedError
from commsched.core.group import DependencyProxy
from commsched.session.trace import TraceObserver

from .training import loss, make_batch, make_params, on_one_rank_of_two, on_ranks, require_close, train_alone

TX = optax.adam(0.01)
LACKS = "^this state lacks an update whose averages are gone, or were never here: "


def norm(params: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)))


def begin(session: Session) -> tuple[cs.TrainState, Any]:
    return cs.create(make_params(session.rank), TX, session=session), jax.jit(cs.value_and_update(loss))


def test_reading_between_steps_changes_nothing() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        seen = []
        for index in range(3):
            _, state = step(state, *make_batch(session.rank, index))
            assert state.params is state.params
            seen.append((state.params, state.opt_state[0].count))
        return seen

    by_rank = on_ranks(2, run)
    for index in range(3):
        require_close([seen[index][0] for seen in by_rank], train_alone(TX, 2, index + 1))
        assert by_rank[0][index][1] == index + 1


def test_a_state_that_was_read_is_still_updated_by_the_program_of_the_step() -> None:
    """Another program may round otherwise, and other ranks may not have read it."""

    def run(session: Session) -> None:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        before = jax.tree.map(np.asarray, jax.tree.leaves(state))
        state.params  # noqa: B018
        after = jax.tree.leaves(state)
        assert after[-1] == before[-1] != 0  # the update that it lacks
        for leaf, expected in zip(after, before):
            np.testing.assert_array_equal(leaf, expected)

    on_one_rank_of_two(run)


def test_reading_within_a_program() -> None:
    def run(session: Session) -> Any:
        state, _ = begin(session)

        @jax.jit
        def step(state: cs.TrainState, *batch: Any) -> Any:
            before = norm(state.params)
            _, after = cs.value_and_update(loss)(state, *batch)
            return after, before, norm(state.params)

        evaluate = jax.jit(lambda state, *batch: loss(state.params, *batch))
        for index in range(3):
            expected = norm(state.params)
            evaluated = evaluate(state, *make_batch(0, 9))
            assert evaluated == pytest.approx(float(loss(state.params, *make_batch(0, 9))), rel=1e-9)
            state, before, after = step(state, *make_batch(session.rank, index))
            np.testing.assert_allclose([before, after], expected, rtol=1e-12)
        return state.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 3))


def test_reading_within_branches_and_inner_functions_of_a_program() -> None:
    def run(session: Session) -> Any:
        state, _ = begin(session)
        taking_it = jax.jit(lambda state: norm(state.params))

        @jax.jit
        def step(state: cs.TrainState, *batch: Any) -> Any:
            recomputed = jax.checkpoint(lambda factor: factor * norm(state.params))
            before = jax.grad(recomputed)(1.0)
            value, after = cs.value_and_update(loss)(state, *batch)
            return after, [before, jax.lax.cond(value > 0, lambda: norm(state.params), lambda: 0.0), taking_it(state)]

        for index in range(3):
            expected = norm(state.params)
            state, seen = step(state, *make_batch(session.rank, index))
            np.testing.assert_allclose(seen, [expected] * 3, rtol=1e-12)
        return state.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 3))


def test_a_branch_that_reads_after_the_step() -> None:
    def run(session: Session) -> Any:
        state, _ = begin(session)

        @jax.jit
        def step(state: cs.TrainState, *batch: Any) -> Any:
            value, after = cs.value_and_update(loss)(state, *batch)
            return after, jax.lax.cond(value > 0, lambda: norm(state.params), lambda: 0.0)

        calls = str(jax.make_jaxpr(step)(state, *make_batch(session.rank, 0))).count("buffer_callback[")
        assert calls == 4 + 1 + 4  # waits, the step's beginning, gradients: reading waits no second time
        for index in range(2):
            expected = norm(state.params)
            state, seen = step(state, *make_batch(session.rank, index))
            assert seen == pytest.approx(float(expected), rel=1e-12)
        return state.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 2))


@pytest.mark.parametrize("within_the_program", [False, True])
def test_what_is_changed_in_place_counts(within_the_program: bool) -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)

    def run(session: Session) -> None:
        def change(state: cs.TrainState) -> None:
            state.opt_state.hyperparams["learning_rate"] = jnp.zeros(())
            state.params["layer1"]["bias"] = jnp.full(6, 7.0)

        @jax.jit
        def step(state: cs.TrainState, *batch: Any) -> Any:
            _, state = cs.value_and_update(loss)(state, *batch)
            if within_the_program:
                change(state)
            return state

        state = step(cs.create(make_params(0), tx, session=session), *make_batch(session.rank, 0))
        if not within_the_program:
            change(state)
        before = norm(state.params)
        state = step(state, *make_batch(session.rank, 1))
        assert state.params["layer1"]["bias"].tolist() == [7.0] * 6
        assert norm(state.params) == before

    on_one_rank_of_two(run)


def test_a_deep_copy_may_be_stepped_from_too() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        copied = copy.deepcopy(state)
        _, state = step(state, *make_batch(0, 7))
        _, copied = step(copied, *make_batch(session.rank, 1))
        return copied.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 2))


def test_a_step_from_outside_of_its_program_leaks_nothing() -> None:
    def run(session: Session) -> None:
        state, _ = begin(session)
        with jax.checking_leaks():
            jax.jit(lambda *batch: cs.value_and_update(loss)(state, *batch)).trace(*make_batch(0, 0))

    on_one_rank_of_two(run)


def test_a_state_is_read_within_a_program_that_does_not_take_it() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        return jax.jit(lambda: state.params)()

    require_close(on_ranks(2, run), train_alone(TX, 2, 1))


def test_a_synchronized_state_may_be_stepped_from_again() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        kept = cs.synchronize(state)
        copied = jax.tree.map(lambda leaf: np.asarray(leaf), kept)
        _, state = step(kept, *make_batch(0, 7))
        for index in range(1, 3):
            _, copied = step(copied, *make_batch(session.rank, index))
        return copied.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 3))


def test_a_checkpoint_that_only_rank_0_has() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        for index in range(2):
            _, state = step(state, *make_batch(session.rank, index))
        saved = jax.tree.map(np.asarray, (state.params, state.opt_state))
        if session.rank:
            saved = jax.tree.map(np.zeros_like, saved)
        state = cs.create(saved[0], TX, opt_state=saved[1], session=session)
        _, state = step(state, *make_batch(session.rank, 2))
        return state.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 3))


def test_a_state_that_was_stepped_from_is_refused() -> None:
    def run(session: Session) -> None:
        state, step = begin(session)
        _, first = step(state, *make_batch(session.rank, 0))
        _, second = step(first, *make_batch(session.rank, 1))
        with pytest.raises(UnsupportedError, match=LACKS):
            first.params  # noqa: B018
        with pytest.raises(jax.errors.JaxRuntimeError, match="UnsupportedError: this state lacks an update whose averages"):
            step(first, *make_batch(session.rank, 1))
        with pytest.raises(UnsupportedError, match=LACKS):
            cs.jit(cs.value_and_update(loss))(first, *make_batch(session.rank, 1))
        assert np.isfinite(norm(second.params))

    on_one_rank_of_two(run)


def test_a_step_while_the_state_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients come where the averages were that are being read."""
    wait, meanwhile = DependencyProxy.wait, []

    def run(session: Session) -> None:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        step.lower(state, *make_batch(session.rank, 1)).compile()

        def waited(proxy: DependencyProxy) -> None:
            wait(proxy)
            if not meanwhile:
                meanwhile.append(True)
                step(state, *make_batch(session.rank, 1))

        monkeypatch.setattr(DependencyProxy, "wait", waited)
        with pytest.raises(UnsupportedError, match=LACKS):
            state.params  # noqa: B018

    on_one_rank_of_two(run)
    assert meanwhile


def test_what_was_saved_without_synchronizing_is_refused_elsewhere() -> None:
    def run(session: Session) -> None:
        state, step = begin(session)
        _, state = step(state, *make_batch(session.rank, 0))
        saved = jax.tree.leaves(state)
        other, _ = begin(session)
        restored = jax.tree.unflatten(jax.tree.structure(other), saved)
        with pytest.raises(UnsupportedError, match=LACKS):
            restored.params  # noqa: B018

    on_one_rank_of_two(run)


def test_a_step_in_a_branch() -> None:
    def run(session: Session) -> Any:
        state, _ = begin(session)

        @jax.jit
        def step(state: cs.TrainState, skip: Any, *batch: Any) -> cs.TrainState:
            return jax.lax.cond(skip, lambda state: state, lambda state: cs.value_and_update(loss)(state, *batch)[1], state)

        for index, skip in ((0, False), (9, True), (1, False)):
            state = step(state, skip, *make_batch(session.rank, index))
        return state.params

    require_close(on_ranks(2, run), train_alone(TX, 2, 2))


def test_one_rank_is_plain_jax() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        assert "callback" not in str(jax.make_jaxpr(cs.value_and_update(loss))(state, *make_batch(0, 0)))
        for index in range(3):
            _, state = step(state, *make_batch(0, index))
        assert cs.synchronize(state) is state
        return state.params

    (params,) = on_ranks(1, run)
    for leaf, expected in zip(jax.tree.leaves(params), jax.tree.leaves(train_alone(TX, 1, 3))):
        np.testing.assert_array_equal(leaf, expected)


def test_two_trainings_side_by_side() -> None:
    def run(session: Session) -> Any:
        states = [cs.create(make_params(seed + session.rank), TX, session=session) for seed in (0, 50)]

        @jax.jit
        def step(states: Any, *batch: Any) -> Any:
            return [cs.value_and_update(loss)(state, *batch)[1] for state in states]

        for index in range(3):
            states = step(states, *make_batch(session.rank, index))
        return [state.params for state in states]

    by_rank = on_ranks(2, run)
    for place, seed in enumerate((0, 50)):
        require_close([params[place] for params in by_rank], train_alone(TX, 2, 3, params=make_params(seed)))


def test_random_keys_in_the_optimizer_become_those_of_rank_0() -> None:
    def noisy(seed: int) -> Any:
        return optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(seed)), optax.sgd(0.1))

    def own(params: Any, x: Any) -> Any:
        return jnp.sum(params["a"] * x)

    params = {"a": jnp.ones(3), "key": jnp.zeros(())}

    def run(session: Session) -> Any:
        state = cs.create(params, noisy(session.rank), session=session)
        kept = cs.broadcast({"key": jax.random.key(session.rank), "count": session.rank}, session)
        _, state = jax.jit(cs.value_and_update(own))(state, jnp.float64(session.rank))
        assert jax.random.key_data(kept["key"]).tolist() == [0, 0]
        assert kept["count"] == 0
        return state.params

    @jax.jit
    def plain() -> Any:
        updates, _ = noisy(0).update(jax.grad(own)(params, 0.5), noisy(0).init(params))
        return optax.apply_updates(params, updates)

    require_close(on_ranks(2, run), plain())


def test_nothing_is_transferred_implicitly() -> None:
    def run(session: Session) -> Any:
        state, step = begin(session)
        batches = [jax.device_put(make_batch(session.rank, index)) for index in range(2)]
        averaging = cs.average_gradients(session)
        with jax.transfer_guard("disallow"):
            for batch in batches:
                _, state = step(state, *batch)
                state.params  # noqa: B018
            jax.jit(averaging.update)(state.params, averaging.init(state.params))
            return cs.broadcast(state.params, session)

    require_close(on_ranks(2, run), train_alone(TX, 2, 2))


def test_what_is_not_committed_to_a_device_stays_free_to_follow() -> None:
    """An optimizer's count, say, follows parameters that are on another device."""
    stays = jax.device_put(jnp.ones(2), jax.devices()[0])

    def run(session: Session) -> list[bool]:
        kept = cs.broadcast({"free": jnp.zeros(()), "number": np.ones(1), "stays": stays}, session)
        return [kept[name].committed for name in ("free", "number", "stays")]

    assert on_ranks(2, run) == [[False, False, True]] * 2


def test_the_timeline_shows_forward_and_backward_of_each_layer(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        session.observer = TraceObserver(tmp_path, session.rank)
        state, step = begin(session)
        for index in range(2):
            _, state = step(state, *make_batch(session.rank, index))

    on_one_rank_of_two(run)
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    shown = {track: [event["name"] for event in events if event.get("cat") == track] for track in ("forward", "backward")}
    names = [f"layer{index}.{leaf}" for index in range(2) for leaf in ("kernel", "bias")]
    assert shown["forward"] == names
    assert sorted(shown["backward"]) == sorted(2 * names)
