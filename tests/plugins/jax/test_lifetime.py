"""What outlives what: programs that run when the session closes, buffers whose states are gone."""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Transport
from commsched.plugins.jax import registered
from commsched.testing.check_plugin import Delayed
from tests.holding_transport import HoldingTransport

from .training import hold_back, loss, make_batch, make_params, on_one_rank_of_two, on_ranks, require_close, train_alone

TX = optax.adam(0.01)


def test_steps_that_run_when_the_session_closes_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX may run a program after its call has returned: here not before it is waited for."""
    states: dict[int, cs.TrainState] = {}
    not_run_yet: dict[threading.Thread, Callable[[], None]] = {}
    monkeypatch.setattr(jax, "effects_barrier", lambda: not_run_yet.pop(threading.current_thread())())

    def run(session: Session) -> None:
        state, step = cs.create(make_params(session.rank), TX, session=session), jax.jit(cs.value_and_update(loss))
        _, state = step(state, *make_batch(session.rank, 0))

        def second() -> None:
            _, states[session.rank] = step(state, *make_batch(session.rank, 1))

        not_run_yet[threading.current_thread()] = second

    on_ranks(2, run)
    require_close([states[rank].params for rank in range(2)], train_alone(TX, 2, 2))


def test_an_error_after_the_call_has_returned_is_raised_by_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        """What JAX gives in the place of a number, if the program that is to make it fails later."""

        def __init__(self, error: jax.errors.JaxRuntimeError) -> None:
            self._error = error

        def __int__(self) -> int:
            raise self._error

    def breaks(group: TensorGroup, tensor: int) -> None:
        raise FloatingPointError("overflow")

    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        monkeypatch.setattr(TensorGroup, "notify_ready", breaks)
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jax.jit(cs.value_and_update(loss))(state, *make_batch(0, 0))
        state._outstanding = Failed(raised.value)
        with pytest.raises(FloatingPointError, match=r"^overflow$"):
            state.params  # noqa: B018

    on_one_rank_of_two(run)


def test_an_error_keeps_nothing_of_a_program_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shows the variables of its frames, as pytest --showlocals does, would read memory that was given back."""

    def breaks(group: TensorGroup, tensor: int) -> None:
        raise FloatingPointError("overflow")

    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        monkeypatch.setattr(TensorGroup, "notify_ready", breaks)
        with pytest.raises(FloatingPointError) as raised:
            cs.jit(cs.value_and_update(loss))(state, *make_batch(0, 0))
        below = [frame for frame, _ in traceback.walk_tb(raised.tb) if frame.f_code.co_filename != __file__]
        assert "submit" in [frame.f_code.co_name for frame in below]
        assert not [value for frame in below for value in frame.f_locals.values() if isinstance(value, np.ndarray)]

    on_one_rank_of_two(run)


def test_without_jit_nothing_is_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    """JAX would keep a program for each call of each step."""

    def compiled() -> list[str]:
        return [message for message in caplog.messages if "XLA compilation" in message]

    def run(session: Session) -> None:
        state, step = cs.create(make_params(0), TX, session=session), cs.value_and_update(loss)
        for index in range(3):
            caplog.clear()
            with jax.log_compiles():
                _, state = step(state, *make_batch(0, index))
        assert compiled() == []
        tx = optax.chain(cs.average_gradients(session), optax.sgd(0.1))
        opt_state = tx.init(params := make_params(0))
        for _ in range(3):
            caplog.clear()
            with jax.log_compiles():
                params, opt_state = tx.update(params, opt_state)

        assert compiled() == []

    on_one_rank_of_two(run)


def test_the_last_step_may_be_read_after_the_session() -> None:
    """Its averages are waited for, which are on their way only when the session begins to close."""
    states: dict[int, cs.TrainState] = {}
    transports: dict[int, HoldingTransport] = {}

    def wrap(transport: Transport) -> Transport:
        transports[transport.rank] = hold_back(Delayed(transport, transport.rank, 0.05), {0, 1, 2, 3})
        return transports[transport.rank]

    def run(session: Session) -> None:
        session.on_close(transports[session.rank].let_go)
        step = jax.jit(cs.value_and_update(loss))
        _, states[session.rank] = step(cs.create(make_params(session.rank), TX, session=session), *make_batch(session.rank, 0))

    on_ranks(2, run, wrap_transport=wrap)
    require_close([states[rank].params for rank in range(2)], train_alone(TX, 2, 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("commsched-")]


def test_buffers_go_with_states_and_programs() -> None:
    """When the next training begins, if JAX keeps nothing of them in its caches."""
    turns = threading.Barrier(2)

    def train(session: Session) -> tuple[Any, Any, Any]:
        state, step = cs.create(make_params(session.rank), TX, session=session), jax.jit(cs.value_and_update(loss))
        _, state = step(state, *make_batch(session.rank, 0))
        (_, group), *_ = reversed(registered.RegisteredGroups.of(session)._groups)
        buffer = weakref.ref(group.buffers["float64"].obj)
        return state, step, buffer

    def run(session: Session) -> Any:
        state, step, first = train(session)
        _, _, second = train(session)
        assert first() is not None
        assert second() is not None
        _, state = step(state, *make_batch(session.rank, 1))
        params = state.params
        del state, step
        turns.wait(60)  # other ranks' programs are made by the same thread of the engine
        jax.clear_caches()
        gc.collect()
        turns.wait(60)
        assert first() is not None  # not wherever Python collects garbage
        *_, third = train(session)
        assert (first(), second()) == (None, None)
        assert third() is not None
        return params

    require_close(on_ranks(2, run), train_alone(TX, 2, 2))
