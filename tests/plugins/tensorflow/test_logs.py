"""The logs of an epoch are those of all ranks, so that callbacks decide alike."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commsched import ManifestMismatch, RanksDiverged, Session, TransportError, UnsupportedError
from commsched.plugins.tensorflow import AverageLogs, ScheduledOptimizer
from commsched.plugins.tensorflow.logs import mean_logs
from commsched.session.local import local_sessions

from .training import RANKS, made, numbers, on_ranks, one_layer, share

INPUTS, TARGETS = numbers(2)


def test_means() -> None:
    assert mean_logs([{"a": 1.0, "b": 2.0}, {"a": 2.0, "c": 5.0}]) == {"a": 1.5, "b": 2.0, "c": 5.0}
    assert mean_logs([{"a": math.inf}, {"a": 1.0}]) == {"a": math.inf}
    assert math.isnan(mean_logs([{"a": math.inf}, {"a": -math.inf}])["a"])


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


class Own(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds what each rank has of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs |= {
            "val_loss": [[3.0, 2.0, 4.0, 1.0, 6.0], [9.0, 9.0, 1.0, 9.0, 9.0]][self.rank][epoch],
            "file": f"of {self.rank}",
        }


def fit(session: Session, model: Any, *callbacks: Any, epochs: int = 5) -> Any:
    (inputs, _), (targets, _) = share(session, INPUTS, TARGETS)
    return model.fit(inputs, targets, epochs=epochs, verbose=0, callbacks=list(callbacks))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's way to a learning rate
def test_callbacks_of_fit_decide_alike() -> None:
    """Each rank's own losses are least in other epochs, and rise at other times; ``fit`` goes on after what was restored."""
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        model.compile(ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session), loss="mse")
        stopping = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
        reduce = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
        seen = Seen()
        history = fit(session, model, Own(session.rank), AverageLogs(session), stopping, reduce, seen)
        assert [logs["val_loss"] for logs in seen.logs] == [6.0, 5.5, 2.5, 5.0]
        assert {logs["file"] for logs in seen.logs} == {f"of {session.rank}"}
        assert history.history["loss"] == [logs["loss"] for logs in seen.logs]
        fit(session, model)
        return stopping.best_epoch, history.history["loss"], model.get_weights()

    (epoch, losses, ours), (other_epoch, other_losses, others) = on_ranks(body)
    assert (epoch, losses) == (other_epoch, other_losses) == (2, losses)
    assert all((a == b).all() for a, b in zip(ours, others))


def test_fit_averages_by_itself_until_the_end() -> None:
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> Any:
        model = models[session.rank]
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        model.compile(optimizer, loss="mse")
        (inputs, _), (targets, _) = share(session, INPUTS, TARGETS)
        # A validation set on rank 0 alone.
        validation = {"validation_data": (inputs, targets)} if session.rank == 0 else {}
        seen = Seen()
        model.fit(inputs, targets, epochs=2, verbose=0, callbacks=seen, **validation)
        listed = keras.callbacks.CallbackList([seen], model=model, epochs=1, steps=1)
        model.fit(inputs, targets, None, 1, 0, listed)
        averaged = [logs["loss"] for logs in seen.logs], [logs["val_loss"] for logs in seen.logs[:2]]
        optimizer.detach()
        assert "fit" not in vars(model)
        alone = fit(session, model, epochs=1).history["loss"]
        return averaged, alone

    (averaged, alone), (other, other_alone) = on_ranks(body)
    assert averaged == other
    assert len(averaged[0]) == 3
    assert alone != other_alone


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.Nadam])
@pytest.mark.parametrize("eager", [True, False])
def test_a_rank_with_fewer_batches_is_named(make: Any, eager: bool) -> None:
    """It ends its epoch and would wait there, while the other waits for its gradients."""
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        model.compile(ScheduledOptimizer(make(0.1), model, session=session), loss="mse", run_eagerly=eager)
        inputs, targets = share(session, INPUTS, TARGETS)
        steps = 2 - session.rank
        for _ in range(2):
            model.fit(inputs[0][:2], targets[0][:2], batch_size=1, steps_per_epoch=steps, verbose=0)

    match = r"after step 1: 'what comes now' is \"a step\" on rank 0 but \"the end of epoch 0 of fit\" on rank 1"
    with pytest.raises((RanksDiverged, TransportError, tf.errors.OpError), match=match):
        on_ranks(body)


def test_a_rank_in_another_epoch() -> None:
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        model.compile(ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session), loss="mse")
        (inputs, _), (targets, _) = share(session, INPUTS, TARGETS)
        model.fit(inputs, targets, epochs=2, initial_epoch=session.rank, verbose=0)

    match = r"'what comes now' is \"the end of epoch 0 of fit\" on rank 0 but \"the end of epoch 1 of fit\" on rank 1"
    with pytest.raises((RanksDiverged, TransportError), match=match):
        on_ranks(body)


def test_a_model_that_was_compiled_with_another_optimizer() -> None:
    models = [made(one_layer, 0) for _ in range(RANKS)]

    def body(session: Session) -> None:
        model = models[session.rank]
        (inputs, _), (targets, _) = share(session, INPUTS, TARGETS)
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        model.compile("sgd", loss="mse")
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(UnsupportedError, match=r"was compiled with another optimizer than the one.*without averaging"):
                train(inputs, targets)
        optimizer.detach()
        model.train_on_batch(inputs, targets)

    on_ranks(body)


def test_a_rank_that_does_something_else() -> None:
    def body(session: Session) -> None:
        if session.rank == 0:
            AverageLogs(session).on_epoch_end(0, {"loss": 1.0})
        else:
            session.gather("other")

    with pytest.raises((ManifestMismatch, TransportError), match="rank 1 does something else while rank 0 ends epoch 0 of fit"):
        on_ranks(body)


def test_a_rank_in_another_epoch_where_nothing_is_averaged_but_logs() -> None:
    def body(session: Session) -> None:
        AverageLogs(session).on_epoch_end(session.rank, {"loss": 1.0})

    match = r"rank (\d) ends epoch \1 of fit while rank (\d) ends epoch \2 of fit: "
    with pytest.raises((ManifestMismatch, TransportError), match=match):
        on_ranks(body)


def test_one_rank_alone() -> None:
    (session,) = local_sessions(1)
    logs = {"loss": np.float32(2.0)}
    with session:
        AverageLogs(session).on_epoch_end(0, logs)
    assert logs == {"loss": 2.0}
