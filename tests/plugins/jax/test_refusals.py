"""Everything that is refused, by name, and errors that end a job."""

import pickle
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.errors import ManifestMismatch, PeerLost, TransportError, UnsupportedError
from commsched.core.group import TensorGroup

from ..missing import import_without
from .training import loss, make_batch, make_params, on_one_rank_of_two, on_ranks

TX = optax.sgd(0.1)


def refused(message: str, call: Any, kind: type[Exception] = UnsupportedError) -> None:
    """``call`` of every rank raises it, and nothing hangs."""

    def run(session: Session) -> None:
        with pytest.raises(kind, match=message):
            call(session)

    on_ranks(2, run)


def test_parameters_that_cannot_be_averaged() -> None:
    for leaf, message in (
        (jnp.zeros(2, jnp.int32), "^'deep.x' is of int32, so it has no gradient; pass it to the loss beside the parameters$"),
        (jnp.zeros(2, jnp.uint8), "^'deep.x' is of uint8, so it has no gradient; "),
        (jnp.zeros(2, bool), "^'deep.x' is of bool, so it has no gradient; "),
        (jax.random.key(0), r"^'deep.x' is of key<fry>, so it has no gradient; "),
        (jnp.zeros(2, complex), "^'deep.x' is of complex128; the JAX plugin averages float32, float64, float16, bfloat16$"),
        (jnp.zeros(2, jnp.float8_e4m3fn), "^'deep.x' is of float8_e4m3fn; the JAX plugin averages "),
    ):
        refused(message, lambda session, leaf=leaf: cs.create({"deep": {"x": leaf}}, TX, session=session))
    refused("^'deep.x' is a str, not an array$", lambda session: cs.create({"deep": {"x": "text"}}, TX, session=session))
    refused("^there are no parameters$", lambda session: cs.create({}, TX, session=session))


def test_a_state_belongs_to_its_process() -> None:
    def run(session: Session) -> None:
        with pytest.raises(
            UnsupportedError, match=r"^a TrainState belongs to this process; save state.params and state.opt_state"
        ):
            pickle.dumps(cs.create(make_params(0), TX, session=session))

    on_ranks(1, run)


def test_parameters_that_differ() -> None:
    refused(
        r"^there is 'layer0.bias' float64\[6\] on rank 0 but 'layer0.bias' float32\[6\] on rank 1$",
        lambda session: cs.create(make_params(0, ["float64", "float32"][session.rank]), TX, session=session),
        ManifestMismatch,
    )
    refused(
        r"^there is nothing more on rank 0 but 'optimizer state .*trace.layer0.bias' float64\[6\] on rank 1$",
        lambda session: cs.create(make_params(0), optax.sgd(0.1, momentum=[None, 0.9][session.rank]), session=session),
        ManifestMismatch,
    )


def test_another_leaf_in_one_place() -> None:
    refused(
        r"^there is 'a' float64\[\] on rank 0 but 'b' float64\[\] on rank 1$",
        lambda session: cs.create({"ab"[session.rank]: jnp.zeros(())}, TX, session=session),
        ManifestMismatch,
    )


def test_another_call_instead_of_the_first_step() -> None:
    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        if session.rank == 0:
            session.gather({"of the script": 1})
        else:
            with pytest.raises(
                ManifestMismatch, match=r"^rank 0 does something else while rank 1 compares the update: make the same"
            ):
                cs.jit(cs.value_and_update(loss))(state, *make_batch(0, 0))
        session.gather("both are here")
        session.abort("refused")

    on_ranks(2, run)


def test_meeting_within_a_trace() -> None:
    refused(
        "^'layer0.bias' is traced: cs.create\\(\\) needs all ranks, so call it outside jit",
        lambda session: jax.jit(lambda params: cs.create(params, TX, session=session))(make_params(0)),
    )
    refused(
        "^'layer0.bias' is traced: tx.init\\(\\) needs all ranks",
        lambda session: jax.eval_shape(cs.average_gradients(session).init, make_params(0)),
    )


def test_transformations_of_a_step() -> None:
    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        step = cs.value_and_update(loss)
        inputs, targets = make_batch(0, 0)
        with pytest.raises(UnsupportedError, match=r"^a step within jax.vmap: "):
            jax.vmap(step, (None, 0, 0))(state, inputs[None], targets[None])
        with pytest.raises(UnsupportedError, match=r"^a step within jax.vmap: "):  # of a batch that the loss closes over
            jax.vmap(lambda inputs: cs.value_and_update(lambda params: loss(params, inputs, targets))(state))(inputs[None])
        with pytest.raises(UnsupportedError, match=r"^a step cannot be differentiated: "):
            jax.grad(lambda inputs: step(state, inputs, targets)[0])(inputs)
        with pytest.raises(UnsupportedError, match=r"^a step within pmap or shard_map \(over .+\): one rank is one device"):
            jax.pmap(lambda inputs: step(state, inputs, targets)[0])(inputs[None])
        with pytest.raises(UnsupportedError, match=r"^a step begins from a state that cs.create\(\) made, not from a dict"):
            step(make_params(0), inputs, targets)

    on_ranks(2, run)


def test_optimizers_whose_update_cannot_be_made_leaf_by_leaf() -> None:
    def prints(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.print("{}", updates["layer0"]["bias"])
        return updates, state

    def run(session: Session) -> None:
        for tx, message in (
            (optax.GradientTransformation(lambda _: (), prints), r"^the optimizer's update has side effects \(Debug\), "),
            (optax.polyak_sgd(), "^this optimizer needs more than gradients, .* keyword-only argument: 'value'"),
        ):
            state = cs.create(make_params(0), tx, session=session)
            with pytest.raises(UnsupportedError, match=message):
                jax.eval_shape(cs.value_and_update(loss), state, *make_batch(0, 0))

    on_one_rank_of_two(run)


def lazy_momentum(first: Any) -> optax.GradientTransformation:
    """Whose state gets its form at the first update."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(jnp.add, updates, updates if state is first else state)

    return optax.GradientTransformation(lambda params: first, update)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            lazy_momentum(None),
            r"'optimizer state layer0.bias' float64\[6\] of nothing; a state must keep the form",
        ),
        (
            optax.GradientTransformation(
                lambda params: jnp.zeros(3), lambda updates, state, params: (updates, jnp.zeros((2, 3)))
            ),
            r"'optimizer state ' float64\[2, 3\] of 'optimizer state ' float64\[3\]; ",
        ),
        (
            optax.GradientTransformation(lambda params: jnp.ones(()), lambda updates, state, params: (updates, jnp.int32(1))),
            r"'optimizer state ' int32\[\] of 'optimizer state ' float64\[\]; ",
        ),
        (
            optax.GradientTransformation(lambda params: None, lambda updates, state, params: (updates, optax.EmptyState())),
            r"PyTreeDef\(.*EmptyState.* of PyTreeDef\(.*None.*; ",
        ),
    ],
    ids=["leaves", "shape", "dtype", "empty containers"],
)
def test_optimizers_whose_state_changes_its_form(tx: optax.GradientTransformation, message: str) -> None:
    def run(session: Session) -> None:
        state = cs.create(make_params(0), tx, session=session)
        with pytest.raises(UnsupportedError, match="^the optimizer's update makes " + message):
            jax.eval_shape(cs.value_and_update(loss), state, *make_batch(0, 0))

    on_one_rank_of_two(run)


def test_parameters_that_become_others_in_place() -> None:
    def add(params: Any) -> None:
        params["a"] = jnp.zeros(())

    def remove(params: Any) -> None:
        del params["layer1"]["kernel"]

    def reshape(params: Any) -> None:
        params["layer1"]["kernel"] = jnp.zeros((6, 7))

    def widen(params: Any) -> None:
        params["layer1"]["bias"] = params["layer1"]["bias"].astype(jnp.float64)

    begin_anew = r"; begin anew with cs.create\(\)"
    for change, message in (
        (add, r"^the state has 'a' \[\] where cs.create\(\) was given 'layer0.bias' \[6\]" + begin_anew),
        (remove, r"^the state has nothing more where cs.create\(\) was given 'layer1.kernel' \[6, 6\]" + begin_anew),
        (
            reshape,
            r"^the state has 'layer1.kernel' \[6, 7\] where cs.create\(\) was given 'layer1.kernel' \[6, 6\]" + begin_anew,
        ),
        (
            widen,
            r"^'layer1.bias' has become float64, but cs.create\(\) was given float32, the type of its averages" + begin_anew,
        ),
    ):

        def run(session: Session, change: Any = change, message: str = message) -> None:
            step = jax.jit(cs.value_and_update(loss))
            _, state = step(cs.create(make_params(0, jnp.float32), TX, session=session), *make_batch(0, 0))
            change(state.params)
            with pytest.raises(UnsupportedError, match=message):
                step(state, *make_batch(0, 1))

        on_one_rank_of_two(run)


@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_options_that_make_a_step_again(option: str) -> None:
    def run(session: Session) -> None:
        tx, params = cs.average_gradients(session), make_params(0)
        state, averaging = cs.create(params, TX, session=session), tx.init(params)
        jax.config.update(option, True)
        try:
            for traced in (lambda: cs.value_and_update(loss)(state, *make_batch(0, 0)), lambda: tx.update(params, averaging)):
                with pytest.raises(UnsupportedError, match=f"^{option} would run a step a second time when it finds one, "):
                    jax.eval_shape(traced)
        finally:
            jax.config.update(option, False)

    on_one_rank_of_two(run)


def test_arguments_may_have_any_name() -> None:
    def run(session: Session) -> None:
        inputs, targets = make_batch(0, 0)
        own = cs.value_and_update(lambda params, state: loss(params, state, targets))
        value, _ = jax.eval_shape(
            lambda first, inputs: own(first, state=inputs), cs.create(make_params(0), TX, session=session), inputs
        )
        assert value.shape == ()

    on_one_rank_of_two(run)


def test_the_random_numbers_of_the_user_stay() -> None:
    def run(session: Session) -> None:
        before = random.getstate()
        cs.create(make_params(0), TX, session=session)
        assert random.getstate() == before

    on_one_rank_of_two(run)


def test_an_error_is_raised_once() -> None:
    """A later one of another program, with a text that has nothing to do with it, is JAX's own."""

    def fails(_: Any) -> Any:
        raise ValueError("of the user's own")

    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        step = cs.jit(cs.value_and_update(loss))
        assert step.lower(state, *make_batch(0, 0)) is not None
        _, _ = step(state, *make_batch(0, 0)), step(state, *make_batch(0, 1))
        broken = jax.tree.unflatten(jax.tree.structure(state), [*jax.tree.leaves(state)[:-1], jnp.int32(5)])
        with pytest.raises(UnsupportedError, match=r"^this state lacks an update"):
            step(broken, *make_batch(0, 2))
        other = cs.jit(lambda x: jax.pure_callback(fails, jax.ShapeDtypeStruct((), x.dtype), x))
        with pytest.raises(jax.errors.JaxRuntimeError, match="of the user's own"):
            other(jnp.zeros(()))

    on_one_rank_of_two(run)


def test_errors_side_by_side_are_all_known() -> None:
    """The engine makes its text of one of them, not always of the last."""
    first, second = FloatingPointError("first"), FloatingPointError("second")

    def run(session: Session) -> None:
        exchange = cs.create(make_params(0), TX, session=session)._training.exchange

        def raise_both(_: Any) -> None:
            for error in (first, second):
                with suppress(FloatingPointError), exchange._keeping_errors():
                    raise error
            raise first

        fails = cs.jit(lambda number: jax.pure_callback(raise_both, jax.ShapeDtypeStruct((), number.dtype), number))
        with pytest.raises(FloatingPointError) as raised:
            fails(jnp.zeros(()))
        assert raised.value is first

    on_one_rank_of_two(run)


def test_an_error_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(group: TensorGroup, tensor: int) -> None:
        raise KeyboardInterrupt

    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        monkeypatch.setattr(TensorGroup, "notify_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cs.jit(cs.value_and_update(loss))(state, *make_batch(0, 0))

    on_one_rank_of_two(run)


def test_jit_with_options_first() -> None:
    def run(session: Session) -> None:
        @cs.jit(donate_argnums=0)
        def step(state: cs.TrainState, *batch: Any) -> Any:
            return cs.value_and_update(loss)(state, *batch)

        before = cs.create(make_params(0), TX, session=session)
        _, state = step(before, *make_batch(0, 0))
        with pytest.raises(RuntimeError, match="deleted"):
            jax.tree.leaves(before)[0].sum()
        state.params  # noqa: B018

    on_one_rank_of_two(run)


def test_a_rank_that_fails_ends_the_others_with_its_name() -> None:
    errors: dict[int, BaseException] = {}

    def run(session: Session) -> None:
        try:
            with session:
                state, step = cs.create(make_params(0), TX, session=session), cs.jit(cs.value_and_update(loss))
                for index in range(100):
                    if session.rank == 1 and index == 3:
                        raise ZeroDivisionError("the user's own mistake")
                    _, state = step(state, *make_batch(session.rank, index))
        except (TransportError, ZeroDivisionError) as error:
            errors[session.rank] = error

    on_ranks(2, run)
    assert type(errors[1]) is ZeroDivisionError
    assert isinstance(errors[0], TransportError)
    assert "the user's own mistake" in str(errors[0])


def test_a_rank_that_has_fewer_batches_is_named() -> None:
    errors: dict[int, BaseException] = {}

    def run(session: Session) -> None:
        try:
            with session:
                state, step = cs.create(make_params(0), TX, session=session), jax.jit(cs.value_and_update(loss))
                for index in range(2 + session.rank):
                    _, state = step(state, *make_batch(session.rank, index))
                state.params  # noqa: B018
        except PeerLost as error:
            errors[session.rank] = error

    on_ranks(2, run)
    assert str(errors[1]).startswith("rank 0 left after step 1; the average of tensor ")
    assert str(errors[0]) == str(errors[1])


def test_a_step_that_was_broken_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    notify = TensorGroup.notify_ready

    def breaks(group: TensorGroup, tensor: int) -> None:
        if group.manifest.tensors[tensor].name == "layer0.kernel":
            raise FloatingPointError("overflow")
        notify(group, tensor)

    def run(session: Session) -> None:
        step = cs.jit(cs.value_and_update(loss))
        state = cs.create(make_params(0), TX, session=session)
        monkeypatch.setattr(TensorGroup, "notify_ready", breaks)
        with pytest.raises(FloatingPointError, match=r"^overflow$"):
            step(state, *make_batch(session.rank, 0))
        message = r"^step 0 was broken off: this rank has no gradient of 'layer0.kernel', for which other ranks wait$"
        with pytest.raises(UnsupportedError, match=message):
            step(state, *make_batch(session.rank, 0))
        both.wait(60)
        if session.rank == 0:
            session.report(TransportError("the data are gone"))
        failed = threading.Event()
        session.when_failed(lambda error: failed.set())
        assert failed.wait(60)
        with pytest.raises(TransportError, match="the data are gone"):  # the failure counts more
            step(state, *make_batch(session.rank, 0))
        session.abort("it is known")

    both = threading.Barrier(2)
    on_ranks(2, run)


def test_the_missing_engine_is_named(tmp_path: Path) -> None:
    assert 'ModuleNotFoundError: this plugin needs JAX and Optax: pip install "commsched[jax]"' in import_without(
        "jax", tmp_path
    )
