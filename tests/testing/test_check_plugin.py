"""check_plugin must refuse plugins that do not train as plain SGD does. Each is wrong in one way."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from commsched.core.group import TensorGroup
from commsched.core.manifest import Manifest, TensorSpec
from commsched.session.session import Session
from commsched.testing.check_plugin import check_plugin

SIZE, RATE = 40, 0.5
Weights = dict[str, NDArray[Any]]


class Plugin:
    """A right one: gradient descent of one vector towards the mean of what the ranks want."""

    tolerance = 1e-12

    def wanted(self, rank: int, step: int, seed: int) -> NDArray[Any]:
        return np.random.default_rng([seed, rank, step]).standard_normal(SIZE)

    def initial(self, rank: int, seed: int) -> NDArray[Any]:
        return np.random.default_rng([seed, 99, rank]).standard_normal(SIZE)

    def broadcast(self, session: Session, weights: NDArray[Any]) -> None:
        session.broadcast("weights", weights.view(np.uint8).data)

    def wait(self, group: TensorGroup) -> None:
        group.proxies[0].wait()

    def gradient(self, weights: NDArray[Any], rank: int, step: int, seed: int) -> NDArray[Any]:
        return weights - self.wanted(rank, step, seed)

    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        weights = self.initial(rank, seed)
        self.broadcast(session, weights)
        gradient = np.zeros(SIZE)
        manifest = Manifest((TensorSpec("weights", (SIZE,), "float64"),))
        group = session.register(manifest, {"float64": gradient.view(np.uint8).data})
        for step in range(steps):
            group.begin_step()
            gradient[:] = self.gradient(weights, rank, step, seed)
            group.notify_ready(0)
            self.wait(group)
            weights -= RATE * gradient
        return {"weights": weights}

    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        weights = self.initial(0, seed)
        for step in range(steps):
            weights -= RATE * np.mean([weights - self.wanted(rank, step, seed) for rank in range(world_size)], axis=0)
        return {"weights": weights}


class ReadsTooEarly(Plugin):
    def wait(self, group: TensorGroup) -> None:
        pass


class StartsFromItsOwn(Plugin):
    def broadcast(self, session: Session, weights: NDArray[Any]) -> None:
        pass


class SendsTheSum(Plugin):
    def gradient(self, weights: NDArray[Any], rank: int, step: int, seed: int) -> NDArray[Any]:
        return 2 * super().gradient(weights, rank, step, seed)


class RoundsALittle(Plugin):
    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        return {"weights": np.nextafter(super().train_alone(world_size, steps, seed)["weights"], np.inf)}


class ChangesNothing(Plugin):
    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        return super().train_alone(world_size, 0, seed)


class ForgetsATensor(Plugin):
    def train_alone(self, world_size: int, steps: int, seed: int) -> Weights:
        weights = super().train_alone(world_size, steps, seed)
        return weights | {"bias": np.zeros(3)}


class ChangesTheDtype(Plugin):
    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        return {"weights": super().train(session, rank, world_size, steps, seed)["weights"].astype("float32")}


class Raises(Plugin):
    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        if rank == world_size - 1:
            raise ZeroDivisionError("the plugin's own mistake")
        return super().train(session, rank, world_size, steps, seed)


class KnowsOnlyTheFirstPlan(Plugin):
    def wait(self, group: TensorGroup) -> None:
        if len(group.plan.partitions) in (1, 5):  # of 1000 and 64 bytes
            super().wait(group)


class NeverNotifies(Plugin):
    def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
        manifest = Manifest((TensorSpec("weights", (SIZE,), "float64"),))
        group = session.register(manifest, {"float64": memoryview(bytearray(8 * SIZE))})
        group.begin_step()
        self.wait(group)
        raise AssertionError("not reached")


def test_a_right_plugin_is_accepted() -> None:
    check_plugin(Plugin())


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (StartsFromItsOwn(), r"^world size 2, .*: 'weights' is not bitwise equal on rank 0 and rank 1$"),
        (SendsTheSum(), r"^world size 1, .*: 'weights' differs from training alone by "),
        (RoundsALittle(), r"^world size 1, .*: 'weights' differs from training alone by .*, the tolerance 0$"),
        (ChangesNothing(), r"^world size 1, .*: the last of 8 steps changes no weight, so this training shows nothing$"),
        (ForgetsATensor(), r"training alone has the tensors \['bias', 'weights'\], the plugin \['weights'\]$"),
        (ChangesTheDtype(), r"'weights' is float64\[40\] alone, float32\[40\] through the plugin$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plugin) else "",
)
def test_a_plugin_that_is_wrong_is_refused(adapter: Plugin, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_plugin(adapter)


def test_a_plugin_that_reads_too_early_is_refused() -> None:
    """It reads the rank's own gradient where it is not yet sent, and no number at all where it is."""
    with pytest.raises(AssertionError, match=r"'weights' is not (finite; memory was read between notify_ready|bitwise equal)"):
        check_plugin(ReadsTooEarly(), world_sizes=(2,))


def test_a_plugin_that_is_wrong_once_the_plan_changes_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"^world size 2, a configuration that changes(, rank 1)?: 'weights' is not"):
        check_plugin(KnowsOnlyTheFirstPlan(), world_sizes=(2,))


def test_too_few_steps_for_the_configuration_to_change_are_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"^world size 2, a configuration that changes: the configuration never changed between two steps"
    ):
        check_plugin(Plugin(), world_sizes=(2,), steps=1)


def test_what_a_plugin_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError, match="the plugin's own mistake"):
        check_plugin(Raises(), world_sizes=(2,))


def test_a_plugin_that_hangs_is_named_with_its_stack_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError, match=r"(?s)rank 0 still runs.*self._core.wait_for"):
        check_plugin(NeverNotifies(), world_sizes=(2,), timeout_seconds=2.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_a_thread_that_a_plugin_leaves_is_named() -> None:
    release = threading.Event()

    class LeavesAThread(Plugin):
        def train(self, session: Session, rank: int, world_size: int, steps: int, seed: int) -> Weights:
            threading.Thread(target=release.wait, args=(20,), name="commsched-poller", daemon=True).start()
            return super().train(session, rank, world_size, steps, seed)

    with pytest.raises(AssertionError, match=r"threads are left after close: commsched-poller$"):
        check_plugin(LeavesAThread(), world_sizes=(1,))
    release.set()
