import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import commsched
from commsched.core.errors import CommschedError, ConfigError, ManifestMismatch, TransportError, UnsupportedError
from commsched.core.group import DependencyProxy
from commsched.core.interfaces import Transport
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.session.trace import TraceObserver
from commsched.testing.check_plugin import check_plugin
from commsched.testing.world import run_world
from tests.holding_transport import HoldingTransport

FEATURES, CLASSES, BATCH = 6, 3, 4
Weights = dict[str, NDArray[Any]]
Batch = tuple[NDArray[Any], NDArray[Any]]  # inputs, labels


def make_network(rng: np.random.Generator, dtype: str = "float64") -> Network:
    return Network([Linear(FEATURES, 8, rng, dtype), ReLU(), Linear(8, 5, rng, dtype), ReLU(), Linear(5, CLASSES, rng, dtype)])


def make_batch(rank: int, step: int, seed: int, dtype: str = "float64") -> Batch:
    rng = np.random.default_rng([seed, rank, step])
    return rng.standard_normal((BATCH, FEATURES)).astype(dtype), rng.integers(0, CLASSES, BATCH)


def joint_batch(world_size: int, step: int, seed: int, dtype: str = "float64") -> Batch:
    inputs, labels = zip(*(make_batch(rank, step, seed, dtype) for rank in range(world_size)))
    return np.concatenate(inputs), np.concatenate(labels)


def train(
    network: Network, optimizer: SGD | ScheduledOptimizer, batches: list[tuple[NDArray[Any], NDArray[Any]]]
) -> list[float]:
    """The training loop, the same with and without commsched; the losses."""
    losses = []
    for inputs, labels in batches:
        loss, gradient = softmax_cross_entropy(network.forward(inputs), labels)
        network.backward(gradient)
        optimizer.step()
        losses.append(loss)
    return losses


def weights_of(network: Network) -> Weights:
    return {
        f"{index}.{name}": parameter.copy()
        for index, layer in enumerate(network.layers)
        for name, parameter in layer.parameters.items()
    }


class Adapter:
    def __init__(self, dtype: str, tolerance: float, momentum: float) -> None:
        self.dtype = dtype
        self.tolerance = tolerance
        self.momentum = momentum

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        network = make_network(np.random.default_rng([seed, rank]), self.dtype)
        optimizer = ScheduledOptimizer(SGD(network, 0.1, self.momentum), session)
        train(network, optimizer, [make_batch(rank, step, seed, self.dtype) for step in range(steps)])
        optimizer.synchronize()
        return weights_of(network)

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        network = make_network(np.random.default_rng([seed, 0]), self.dtype)
        train(
            network,
            SGD(network, 0.1, self.momentum),
            [joint_batch(world_size, step, seed, self.dtype) for step in range(steps)],
        )
        return weights_of(network)


def on_ranks(
    world_size: int, fn: Callable[[Session], Any], config: SchedulerConfig | None = None, check_weights: int = 0
) -> list[Any]:
    """``fn`` on every rank, in a session of its own."""
    sessions = local_sessions(world_size, config, check_weights=check_weights)

    def run(rank: int) -> Any:
        with sessions[rank] as session:
            return fn(session)

    try:
        return run_world(world_size, run)
    finally:
        for session in sessions:
            session.abort("the test is over")


# --- the engine ---


def numeric_gradient(loss: Callable[[], float], array: NDArray[Any]) -> NDArray[Any]:
    gradient = np.zeros_like(array)
    for place in np.ndindex(array.shape):
        kept, step = array[place], 1e-6
        array[place] = kept + step
        above = loss()
        array[place] = kept - step
        gradient[place] = (above - loss()) / (2 * step)
        array[place] = kept
    return gradient


def test_gradients_are_those_of_the_loss() -> None:
    network = make_network(np.random.default_rng(3))
    inputs, labels = make_batch(0, 0, 3)
    _, gradient = softmax_cross_entropy(network.forward(inputs), labels)
    network.backward(gradient)
    for layer in network.layers:
        for name, parameter in layer.parameters.items():
            expected = numeric_gradient(lambda: softmax_cross_entropy(network.forward(inputs), labels)[0], parameter)
            np.testing.assert_allclose(layer.gradients[name], expected, rtol=1e-5, atol=1e-8)


def test_the_loss_survives_large_logits() -> None:
    loss, gradient = softmax_cross_entropy(np.array([[1e4, -1e4, 0.0]]), np.array([1]))
    assert loss == 2e4
    np.testing.assert_array_equal(gradient, [[1.0, -1.0, 0.0]])


def test_momentum_by_hand() -> None:
    network = Network([Linear(1, 1, np.random.default_rng(0))])
    (layer,) = network.layers
    layer.parameters["weight"][:] = 1.0
    layer.gradients["weight"][:] = 2.0
    optimizer = SGD(network, learning_rate=0.1, momentum=0.5)
    optimizer.step()
    assert layer.parameters["weight"][0, 0] == pytest.approx(1.0 - 0.1 * 2)
    optimizer.step()
    assert layer.parameters["weight"][0, 0] == pytest.approx(1.0 - 0.1 * 2 - 0.1 * 3)


def test_it_learns() -> None:
    network = make_network(np.random.default_rng(0))
    losses = train(network, SGD(network, 0.2, 0.9), [make_batch(0, 0, 0)] * 60)
    assert losses[-1] < 0.05 < losses[0]


# --- equality with training alone ---


@pytest.mark.parametrize(
    "adapter",
    [Adapter("float64", 1e-9, momentum=0.9), Adapter("float64", 1e-9, momentum=0.0), Adapter("float32", 1e-5, momentum=0.9)],
    ids=["float64 momentum", "float64", "float32 momentum"],
)
def test_it_conforms(adapter: Adapter) -> None:
    check_plugin(adapter)


def test_hyper_parameters_count_as_they_were_at_step() -> None:
    """The update runs later than step, but with the learning rate and the momentum of then."""
    seed, steps = 5, 6

    def schedule(optimizer: SGD, step: int) -> None:
        optimizer.learning_rate = 0.1 / (step + 1)
        optimizer.momentum = 0.9 - 0.1 * step

    def run(network: Network, sgd: SGD, optimizer: SGD | ScheduledOptimizer, batches: list[Any]) -> None:
        for step, batch in enumerate(batches):
            schedule(sgd, step)
            train(network, optimizer, [batch])
            sgd.learning_rate = sgd.momentum = 100.0  # must not count

    def through_the_plugin(session: Session) -> Weights:
        network = make_network(np.random.default_rng(seed))
        optimizer = ScheduledOptimizer(sgd := SGD(network, 0.0), session)
        run(network, sgd, optimizer, [make_batch(session.rank, step, seed) for step in range(steps)])
        optimizer.synchronize()
        return weights_of(network)

    alone = make_network(np.random.default_rng(seed))
    run(alone, sgd := SGD(alone, 0.0), sgd, [joint_batch(2, step, seed) for step in range(steps)])
    for weights in on_ranks(2, through_the_plugin, SchedulerConfig(64, 64)):
        for name, expected in weights_of(alone).items():
            np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-12)


def same_as_plain(loop: Callable[[Network, SGD | ScheduledOptimizer], object]) -> None:
    """``loop`` with one rank, where commsched must change nothing at all."""

    def through_the_plugin(session: Session) -> Weights:
        network = make_network(np.random.default_rng(2))
        optimizer = ScheduledOptimizer(SGD(network, 0.1, 0.9), session)
        loop(network, optimizer)
        optimizer.synchronize()
        return weights_of(network)

    plain = make_network(np.random.default_rng(2))
    loop(plain, SGD(plain, 0.1, 0.9))
    (weights,) = on_ranks(1, through_the_plugin)
    for name, expected in weights_of(plain).items():
        np.testing.assert_array_equal(weights[name], expected)


def test_evaluation_between_steps_updates_nothing_twice() -> None:
    def loop(network: Network, optimizer: SGD | ScheduledOptimizer) -> None:
        for step in range(4):
            train(network, optimizer, [make_batch(0, step, 2)])
            for _ in range(3):
                network.forward(make_batch(9, step, 2)[0])

    same_as_plain(loop)


def test_a_signal_handler_that_runs_forward_while_an_update_is_awaited_updates_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handling = threading.local()
    waited = DependencyProxy.wait

    def interrupted_wait(proxy: DependencyProxy, *arguments: Any) -> None:
        network = getattr(handling, "network", None)
        if network is not None:
            handling.network = None
            network.forward(np.ones((1, FEATURES)))
            handling.network = network
        waited(proxy, *arguments)

    def loop(network: Network, optimizer: SGD | ScheduledOptimizer) -> None:
        for step in range(4):
            train(network, optimizer, [make_batch(0, step, 2)])
            if isinstance(optimizer, ScheduledOptimizer):
                handling.network = network
                optimizer.synchronize() if step == 2 else network.forward(make_batch(9, step, 2)[0])
                handling.network = None

    monkeypatch.setattr(DependencyProxy, "wait", interrupted_wait)
    same_as_plain(loop)


def test_a_step_left_out_updates_nothing() -> None:
    def loop(network: Network, optimizer: SGD | ScheduledOptimizer) -> None:
        for step in range(4):
            _, gradient = softmax_cross_entropy(network.forward(make_batch(0, step, 2)[0]), make_batch(0, step, 2)[1])
            network.backward(gradient)
            if step % 2:
                optimizer.step()

    same_as_plain(loop)


def test_two_steps_update_twice() -> None:
    def loop(network: Network, optimizer: SGD | ScheduledOptimizer) -> None:
        for step in range(3):
            train(network, optimizer, [make_batch(0, step, 2)])
            optimizer.step()

    same_as_plain(loop)


def test_backward_without_another_forward_loses_no_update() -> None:
    def loop(network: Network, optimizer: SGD | ScheduledOptimizer) -> None:
        _, gradient = softmax_cross_entropy(network.forward(make_batch(0, 0, 2)[0]), make_batch(0, 0, 2)[1])
        for _ in range(3):
            network.backward(gradient)
            optimizer.step()

    same_as_plain(loop)


def test_the_session_makes_the_last_updates_when_it_closes() -> None:
    networks: dict[int, Network] = {}

    def forget_to_synchronize(session: Session) -> None:
        networks[session.rank] = network = make_network(np.random.default_rng(session.rank))
        optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
        train(network, optimizer, [make_batch(session.rank, step, 1) for step in range(3)])

    on_ranks(2, forget_to_synchronize)
    expected = make_network(np.random.default_rng(0))
    train(expected, SGD(expected, 0.1), [joint_batch(2, step, 1) for step in range(3)])
    for network in networks.values():
        for name, weight in weights_of(network).items():
            np.testing.assert_allclose(weight, weights_of(expected)[name], rtol=0, atol=1e-12)


# --- what it starts from ---


def test_parameters_and_velocities_become_those_of_rank_0() -> None:
    def open_rank(session: Session) -> tuple[Weights, list[dict[str, NDArray[Any]]]]:
        network = make_network(np.random.default_rng(session.rank))
        sgd = SGD(network, 0.1, 0.9)
        for velocities in sgd.velocities:
            for velocity in velocities.values():
                velocity += session.rank + 1
        ScheduledOptimizer(sgd, session)
        return weights_of(network), sgd.velocities

    expected = weights_of(make_network(np.random.default_rng(0)))
    for weights, velocities in on_ranks(3, open_rank):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, expected[name])
        assert all((velocity == 1).all() for layer in velocities for velocity in layer.values())


def test_weights_of_two_optimizers_are_compared_whichever_is_updated_first() -> None:
    def run(session: Session) -> None:
        networks = [make_network(np.random.default_rng(seed)) for seed in (1, 2)]
        optimizers = [ScheduledOptimizer(SGD(network, 0.1), session) for network in networks]
        for step in range(4):
            for network, optimizer in zip(networks, optimizers):
                train(network, optimizer, [make_batch(session.rank, step, 3)])
            for optimizer in optimizers if session.rank == 0 else optimizers[::-1]:
                optimizer.synchronize()
        session.gather("every comparison has ended")
        session.core.check()

    on_ranks(2, run, check_weights=1)


def test_a_second_optimizer_of_a_network_takes_it_over_after_the_last_update_of_the_first() -> None:
    def both(network: Network, make: Callable[[SGD], Any], batches: list[Batch]) -> Any:
        for rate in (0.1, 0.01):
            optimizer = make(SGD(network, rate))
            train(network, optimizer, batches)
        return optimizer

    def run(session: Session) -> Weights:
        network = make_network(np.random.default_rng(session.rank))
        first = ScheduledOptimizer(SGD(network, 0.0), session)

        def make(sgd: SGD) -> ScheduledOptimizer:
            return ScheduledOptimizer(sgd, session)

        both(network, make, [make_batch(session.rank, step, 3) for step in range(3)]).synchronize()
        with pytest.raises(UnsupportedError, match="another ScheduledOptimizer was made for the same network: use that one"):
            first.step()
        return weights_of(network)

    alone = make_network(np.random.default_rng(0))
    both(alone, lambda sgd: sgd, [joint_batch(2, step, 3) for step in range(3)])
    for weights in on_ranks(2, run):
        for name, values in weights_of(alone).items():
            np.testing.assert_allclose(weights[name], values, rtol=1e-9, err_msg=name)


def test_a_step_of_an_optimizer_that_was_made_after_backward_is_refused() -> None:
    """The gradients are in the buffers of the first."""

    def run(session: Session) -> None:
        network = make_network(np.random.default_rng(0))
        ScheduledOptimizer(SGD(network, 0.1), session)
        inputs, labels = make_batch(session.rank, 0, 3)
        network.backward(softmax_cross_entropy(network.forward(inputs), labels)[1])
        second = ScheduledOptimizer(SGD(network, 0.1), session)
        with pytest.raises(UnsupportedError, match="there was no backward since this ScheduledOptimizer was made"):
            second.step()
        train(network, second, [(inputs, labels)])

    on_ranks(2, run)


def test_different_networks_are_refused_on_every_rank() -> None:
    said = []

    def open_rank(session: Session) -> None:
        widths = [(FEATURES, 8), (8, CLASSES)] if session.rank == 0 else [(FEATURES, 8), (8, CLASSES + 1)]
        network = Network([Linear(inputs, outputs, np.random.default_rng(0)) for inputs, outputs in widths])
        with pytest.raises(ManifestMismatch) as raised:
            ScheduledOptimizer(SGD(network, 0.1), session)
        said.append(str(raised.value))

    on_ranks(2, open_rank)
    assert said == [said[0]] * 2
    assert said[0].startswith("tensor 2 is '1.weight' float64[8, 3] on rank 0 but '1.weight' float64[8, 4] on rank 1")


@pytest.mark.parametrize("differs", ["network", "owner"])
def test_a_second_optimizer_that_is_refused_leaves_the_first_as_it_is(differs: str) -> None:
    def run(session: Session) -> Weights:
        network = make_network(np.random.default_rng(0))
        first = ScheduledOptimizer(SGD(network, 0.1), session)
        train(network, first, [make_batch(session.rank, 0, 3)])
        layers = network.layers
        if differs == "network":
            network.layers = layers[: len(layers) - 2 * session.rank]
            with pytest.raises(ManifestMismatch, match=r"the first that only one has is '4.weight'"):
                ScheduledOptimizer(SGD(network, 0.1), session)
            network.layers = layers
        else:
            other = network if session.rank == 0 else make_network(np.random.default_rng(0))
            said = "the network belongs to an earlier ScheduledOptimizer on rank 0 but no other one on rank 1"
            with pytest.raises(ConfigError, match=said):
                ScheduledOptimizer(SGD(other, 0.1), session)
        train(network, first, [make_batch(session.rank, 1, 3)])
        first.synchronize()
        return weights_of(network)

    alone = make_network(np.random.default_rng(0))
    train(alone, SGD(alone, 0.1), [joint_batch(2, step, 3) for step in range(2)])
    for weights in on_ranks(2, run):
        for name, values in weights_of(alone).items():
            np.testing.assert_allclose(weights[name], values, rtol=1e-9, err_msg=name)


def test_a_parameter_that_becomes_another_array_is_named() -> None:
    """Nobody would notice if ranks give it different values."""

    def run(session: Session) -> None:
        network = make_network(np.random.default_rng(0))
        optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
        train(network, optimizer, [make_batch(session.rank, 0, 3)])
        optimizer.synchronize()
        layer = network.layers[2]
        layer.parameters["bias"] = layer.parameters["bias"] + session.rank
        with pytest.raises(UnsupportedError, match=r"^parameter '2.bias' was replaced by another array, which is not compared"):
            train(network, optimizer, [make_batch(session.rank, 1, 3)])
        session.gather("both have seen it")
        session.abort("refused")

    on_ranks(2, run)


@pytest.mark.parametrize("shares", ["an array", "a view of it"])
def test_layers_that_share_memory_are_refused(shares: str) -> None:
    """Forward would read the weight of one layer when the update of the other was made, or before."""

    def open_rank(session: Session) -> None:
        network = Network([Linear(3, 3, np.random.default_rng(0)) for _ in range(2)])
        weight = network.layers[0].parameters["weight"]
        network.layers[1].parameters["weight"] = weight if shares == "an array" else weight[:]
        with pytest.raises(UnsupportedError, match=r"^parameters '0.weight' and '1.weight' share memory; "):
            ScheduledOptimizer(SGD(network, 0.1), session)

    on_ranks(1, open_rank)


@pytest.mark.parametrize("dtype", ["int64", "complex128"])
def test_a_dtype_that_cannot_be_averaged_is_refused(dtype: str) -> None:
    def open_rank(session: Session) -> None:
        network = Network([Linear(2, 2, np.random.default_rng(0), dtype)])
        with pytest.raises(UnsupportedError, match=f"^tensor '0.weight' has dtype {dtype}; commsched communicates "):
            ScheduledOptimizer(SGD(network, 0.1), session)

    on_ranks(1, open_rank)


def test_a_parameter_that_is_not_one_piece_of_memory_is_refused() -> None:
    def open_rank(session: Session) -> None:
        network = Network([Linear(3, 2, np.random.default_rng(0))])
        network.layers[0].parameters["weight"] = np.zeros((2, 3)).T
        with pytest.raises(UnsupportedError, match=r"^tensor '0.weight' is not one writable piece of memory; "):
            ScheduledOptimizer(SGD(network, 0.1), session)

    on_ranks(1, open_rank)


def test_it_takes_the_session_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_rank(session: Session) -> None:
        monkeypatch.setattr(commsched, "init", lambda device: session if device == "cpu" else None)
        network = make_network(np.random.default_rng(0))
        train(network, ScheduledOptimizer(SGD(network, 0.1)), [make_batch(0, 0, 0)])
        assert session.core.group_count > 0

    on_ranks(1, open_rank)
    on_ranks(1, open_rank)


# --- overlap, failure ---


def test_forward_runs_while_late_layers_are_still_on_their_way() -> None:
    transports: list[HoldingTransport] = []

    def is_held(task: CommTask) -> bool:
        return task.partition.dtype == "float64" and task.partition.tensors[0] >= 4  # the last Linear

    def hold_back(transport: Transport) -> Transport:
        transports.append(HoldingTransport(transport, is_held))
        return transports[0]

    (session,) = local_sessions(1, SchedulerConfig(8, 8), wrap_transport=hold_back)
    reached = threading.Event()

    class Notes(ReLU):
        def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
            reached.set()
            return super().forward(inputs)

    rng = np.random.default_rng(0)
    network = Network([Linear(FEATURES, 8, rng), ReLU(), Linear(8, 5, rng), Notes(), Linear(5, CLASSES, rng)])

    def run(rank: int) -> None:
        with session:
            optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
            train(network, optimizer, [make_batch(0, 0, 0)])
            reached.clear()
            outputs: list[NDArray[Any]] = []
            forward = threading.Thread(target=lambda: outputs.append(network.forward(make_batch(0, 1, 0)[0])), daemon=True)
            forward.start()
            assert reached.wait(60), "the front layers' forward waited for the last layer's average"
            assert not outputs
            transports[0].let_go()
            forward.join(60)
            assert len(outputs) == 1

    run_world(1, run)


def test_a_rank_that_fails_ends_the_others_with_its_name() -> None:
    sessions = local_sessions(2)
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            with sessions[rank] as session:
                network = make_network(np.random.default_rng(0))
                optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
                for step in range(100):
                    if rank == 1 and step == 3:
                        raise ZeroDivisionError("the user's own mistake")
                    train(network, optimizer, [make_batch(rank, step, 0)])
        except (CommschedError, ZeroDivisionError) as error:
            errors[rank] = error

    run_world(2, run)
    assert type(errors[1]) is ZeroDivisionError
    assert isinstance(errors[0], TransportError)
    assert "the user's own mistake" in str(errors[0])


def test_a_backward_that_was_broken_off_is_named_and_does_not_hang() -> None:
    class Breaks(ReLU):
        def backward(self, output_gradient: NDArray[Any]) -> NDArray[Any]:
            raise FloatingPointError("overflow")

    def run(session: Session) -> None:
        rng = np.random.default_rng(0)
        network = Network([Linear(FEATURES, 8, rng), Breaks(), Linear(8, CLASSES, rng)])
        optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
        with pytest.raises(FloatingPointError):
            train(network, optimizer, [make_batch(0, 0, 0)])
        with pytest.raises(
            UnsupportedError, match=r"^step 0 was broken off: .* no gradient of '0.weight' and 1 more, for which"
        ):
            train(network, optimizer, [make_batch(0, 0, 0)])
        failed = threading.Event()
        session.when_failed(lambda error: failed.set())
        session.report(TransportError("the data are gone"))
        assert failed.wait(60)
        for call in (lambda: train(network, optimizer, [make_batch(0, 0, 0)]), optimizer.step):
            with pytest.raises(TransportError, match="the data are gone"):  # the failure counts more
                call()
        session.abort("it was seen")

    on_ranks(1, run)


# --- the timeline ---


def test_the_timeline_shows_forward_backward_and_update_of_each_layer(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        session.observer = TraceObserver(tmp_path, session.rank)
        network = Network([Linear(FEATURES, 8, np.random.default_rng(0)), ReLU(), Linear(8, CLASSES, np.random.default_rng(0))])
        optimizer = ScheduledOptimizer(SGD(network, 0.1), session)
        train(network, optimizer, [make_batch(0, 0, 0)])
        optimizer.synchronize()

    on_ranks(1, run)
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    shown = {
        track: [event["name"] for event in events if event.get("cat") == track] for track in ("forward", "backward", "update")
    }
    names = ["0 Linear", "1 ReLU", "2 Linear"]
    assert shown == {"forward": names, "backward": names[::-1], "update": names}
