"""What runs before what: proven by averages that the test holds back."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import commsched.plugins.jax as cs
from commsched import Session
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Transport
from commsched.plugins.jax import update
from commsched.session.trace import TraceObserver
from tests.holding_transport import HoldingTransport

from .training import LAYERS, hold_back, make_batch, make_params, on_one_rank_of_two

LAST_LAYER = {2 * LAYERS - 2, 2 * LAYERS - 1}  # of the manifest: forward order


#: What JAX takes where nothing is said: other tests do not (conftest.py, training.py).
AS_EVER = {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@pytest.fixture(autouse=True)
def _compiled_as_ever() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def plain(index: int, inputs: Any) -> Any:
    return inputs


def padded(index: int, inputs: Any) -> Any:
    """Of what enters a layer, the first number is known before the rest is computed."""
    return jnp.concatenate([jnp.zeros((1, inputs.shape[1])), inputs])


def first_layer_runs(
    between: Any, params: Any, seconds: float, cast: bool = False, observer: TraceObserver | None = None
) -> bool:
    """Whether the first layer of the second step is done within ``seconds`` while averages of the last layer are missing."""
    transports: list[HoldingTransport] = []
    reached = threading.Event()

    def wrap(transport: Transport) -> Transport:
        transports.append(hold_back(transport, LAST_LAYER))
        return transports[-1]

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        if cast:
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        for index in range(LAYERS):
            layer = params[f"layer{index}"]
            inputs = jnp.tanh(between(index, inputs) @ layer["kernel"] + layer["bias"])
            if index == 0:
                jax.debug.callback(lambda _: reached.set(), inputs)
        return jnp.mean(inputs**2)

    def run(session: Session) -> bool:
        if observer is not None:
            session.observer = observer
            session.observe(observer)
        state = cs.create(params, optax.adam(0.01), session=session)
        step = jax.jit(cs.value_and_update(loss), compiler_options=AS_EVER)
        _, state = step(state, *make_batch(session.rank, 0))
        reached.clear()
        ended = threading.Event()

        def second() -> None:
            step(state, *make_batch(session.rank, 1))[0].block_until_ready()
            ended.set()

        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        in_time = reached.wait(seconds)
        assert not ended.is_set(), "a step ended without the averages of the one before"
        for transport in transports:
            transport.let_go()
        assert ended.wait(60)
        thread.join()
        return in_time

    (in_time,) = on_one_rank_of_two(run, wrap_transport=wrap)
    return in_time


@pytest.mark.parametrize(
    ("between", "cast"), [(plain, False), (padded, False), (plain, True)], ids=["plain", "padded", "all cast ahead"]
)
def test_forward_runs_while_the_last_layer_is_on_its_way(between: Any, cast: bool) -> None:
    assert first_layer_runs(between, make_params(0), 60, cast)


def test_the_timeline_shows_the_next_forward_beside_communication(tmp_path: Path) -> None:
    """As docs/jax.md says: averages of step 0 that come while layers of step 1 run."""
    assert first_layer_runs(plain, make_params(0), 60, observer=TraceObserver(tmp_path, 0))
    spans = [event for event in json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"] if event["ph"] == "X"]

    def shown(track: str, layer: str, step: int | None = None) -> list[tuple[float, float]]:
        return [
            (span["ts"], span["ts"] + span["dur"])
            for span in spans
            if span["cat"] == track and span["name"].startswith(layer) and step in (None, span["args"].get("step"))
        ]

    handed_over, there = [begin for begin, _ in shown("queue", "layer1", 0)], [end for _, end in shown("reply", "layer1", 0)]
    assert len(handed_over) == len(there) > 0
    first, second = sorted(shown("forward", "layer0"))  # of step 1, in two parts: in step 0 there is nothing to wait for
    assert max(handed_over) < first[0] < first[1] < second[0] < min(there)
    (last,) = shown("forward", "layer1.bias")
    assert last[0] >= max(there)


def test_without_the_activation_gates_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test before: a wait that depends on no activation comes too soon."""
    monkeypatch.setattr(update, "has_token", lambda value: False)
    assert not first_layer_runs(plain, make_params(0), 1)


def test_gradients_are_handed_over_last_layer_first_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    notify = TensorGroup.notify_ready

    def noted(group: TensorGroup, tensor: int) -> None:
        if group.manifest.tensors[tensor].dtype != "uint8":
            events.append(group.manifest.tensors[tensor].name)
        notify(group, tensor)

    @jax.custom_vjp
    def mark(inputs: Any) -> Any:
        return inputs

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        jax.debug.callback(lambda _: events.append("backward of the first layer begins"), cotangent)
        return (cotangent,)

    mark.defvjp(lambda inputs: (inputs, None), backward)

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        for index in range(LAYERS):
            layer = params[f"layer{index}"]
            inputs = jnp.tanh(inputs @ layer["kernel"] + layer["bias"])
            inputs = mark(inputs) if index == 0 else inputs
        return jnp.mean(inputs**2)

    def run(session: Session) -> None:
        state = cs.create(make_params(0), optax.adam(0.01), session=session)
        jax.jit(cs.value_and_update(loss), compiler_options=AS_EVER)(state, *make_batch(0, 0))

    monkeypatch.setattr(TensorGroup, "notify_ready", noted)
    on_one_rank_of_two(run)
    layers = [name.partition(".")[0] for name in events if name.startswith("layer")]
    assert layers == ["layer1", "layer1", "layer0", "layer0"]
    assert events.index("backward of the first layer begins") >= 2
    assert events.index("backward of the first layer begins") < events.index("layer0.kernel")


def test_layers_are_known_in_the_order_of_forward() -> None:
    """Names in the alphabet's order would be ``a``, ``b``, ``c``."""
    manifests: list[list[str]] = []

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        hidden = jax.jit(lambda kernel, inputs: jnp.tanh(inputs @ kernel))(params["c"], inputs)
        penalty = sum(jnp.sum(leaf**2) for leaf in params.values())
        return jnp.mean((hidden @ params["a"].astype(jnp.float32)) ** 2) + penalty

    def run(session: Session) -> None:
        session.on_register(lambda group, manifest: manifests.append([spec.name for spec in manifest.tensors]))
        kernels = [layer["kernel"] for layer in make_params(0).values()]
        state = cs.create(dict(zip("abc", [*kernels, kernels[0]])), optax.adam(0.01), session=session)
        jax.eval_shape(cs.value_and_update(loss), state, *make_batch(0, 0))

    on_one_rank_of_two(run)
    assert manifests == [["c", "a", "b"]]
