"""Everything that is refused, by name, and errors that end a job."""

import random
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        (jnp.zeros(2, jnp.int32), "^tensor 'deep.x' has dtype int32; commsched communicates "),
        (jnp.zeros(2, jnp.uint8), "^'deep.x' is of uint8, so it has no gradient; "),
        (jnp.zeros(2, complex), "^tensor 'deep.x' has dtype complex128; "),
    ):
        refused(message, lambda session, leaf=leaf: cs.create({"deep": {"x": leaf}}, TX, session=session))
    refused("^'deep.x' is a str, not an array$", lambda session: cs.create({"deep": {"x": "text"}}, TX, session=session))
    refused("^there are no parameters$", lambda session: cs.create({}, TX, session=session))


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


def test_meeting_within_a_trace() -> None:
    refused(
        "^'layer0.bias' is traced: cs.create\\(\\) lets ranks meet, so call it outside jit",
        lambda session: jax.jit(lambda params: cs.create(params, TX, session=session))(make_params(0)),
    )
    refused(
        "^'layer0.bias' is traced: tx.init\\(\\) lets ranks meet",
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
        with pytest.raises(UnsupportedError, match=r"^a step begins from what cs.create\(\) made, not from a dict"):
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
    assert str(errors[1]).startswith("rank 0 left after step 1; tensor ")
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
        message = r"^step 0 was broken off: the gradient of 'layer0.kernel' and . more were never produced$"
        with pytest.raises(UnsupportedError, match=message):
            step(state, *make_batch(session.rank, 0))
        both.wait(30)
        session.abort("it is known")

    both = threading.Barrier(2)
    on_ranks(2, run)


def test_the_missing_engine_is_named(tmp_path: Path) -> None:
    assert 'ModuleNotFoundError: this plugin needs JAX and Optax: pip install "commsched[jax]"' in import_without(
        "jax", tmp_path
    )


def test_numbers_that_are_not_finite_are_shown_as_ever() -> None:
    def run(session: Session) -> None:
        state = cs.create(make_params(0), TX, session=session)
        step = jax.jit(cs.value_and_update(lambda params, inputs: jnp.mean(jnp.sqrt(inputs @ params["layer0"]["kernel"]))))
        value, state = step(state, -np.ones((2, 6)))
        assert np.isnan(value)
        assert np.isnan(state.params["layer0"]["kernel"].sum())

    on_ranks(2, run)
