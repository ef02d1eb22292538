"""GradientExchange: copies gradients into the flat buffers and averages out of them, on the host, for the code of the step.

Calls of a step, on the host: ``begin`` once; ``submit`` for each gradient; ``end`` once the averages are certain to be used.
They are certain to be used as soon as the thread of :mod:`.updater` has the updates to make. If the optimizer needs all
averages at once, ``end`` follows their use.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import commsched

from ...core.errors import ClosedError, UnsupportedError, and_more
from ...core.manifest import Manifest, TensorSpec
from ..common.collectives import gather_alike, register_flat
from ..common.step_flags import StepFlags
from .agreement import Agreement, common_name
from .guard import own_value

#: Indices of variables, consecutive in forward order. Their gradients are submitted in one piece, and their averages arrive and
#: are used in one piece.
Bundle = tuple[int, ...]

#: Gradients above this size are not bundled: their bytes cost more than a submission, so each is submitted early by itself.
_MAX_BUNDLE_BYTES = 256 * 1024
_ADVICE = "all ranks must make the same steps, and give each epoch as many"
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class GradientExchange:
    """The flat buffers of the gradients of ``variables``. All ranks must have the same variables, in the same order.

    Beside the gradients, one flag for each variable says whether this rank has its gradient. Where it has none it sends zeros,
    which is its contribution to the joint batch. A variable of which no rank has a gradient is not updated. The digests of
    ``agreement`` travel with the flags.

    Making one is collective.

    Args:
        order: the indices of ``variables`` in forward order, as measured; rank 0's is used on all ranks.
        submitted: called with a name whenever gradients were submitted.

    Raises:
        UnsupportedError: a variable's type cannot be averaged, or it is not on the CPU; names it.
        ManifestMismatch: ranks have different variables.
    """

    def __init__(
        self,
        session: commsched.Session,
        variables: Sequence[Any],
        order: Sequence[int],
        agreement: Agreement,
        submitted: Callable[[str], None] | None = None,
    ) -> None:
        for variable in variables:
            value = own_value(variable)
            if value.dtype.name not in _DTYPES:
                raise UnsupportedError(
                    f"variable '{variable.path}' is {value.dtype.name}; only gradients of {', '.join(_DTYPES)} can be averaged"
                )
            if tf.DeviceSpec.from_string(value.device).device_type not in (None, "CPU"):
                raise UnsupportedError(
                    f"variable '{variable.path}' is on {value.device}; the TensorFlow plugin trains on the CPU: begin the "
                    "script with tf.config.set_visible_devices([], 'GPU')"
                )
        self._session = session
        session.statistics.waits_elsewhere = True  # graphs wait in the runtime
        self._agreement = agreement
        self._submitted = submitted
        self._paths = [variable.path for variable in variables]
        self._forward: list[int] = gather_alike(session, "makes the first step", [int(index) for index in order], _ADVICE)[0]
        specs = [
            TensorSpec(
                common_name(index, variables[index]), tuple(variables[index].shape), own_value(variables[index]).dtype.name
            )
            for index in self._forward
        ]
        manifest = Manifest(tuple(specs))
        self._group, views = register_flat(
            session, manifest, as_dtype=lambda name: tf.as_dtype(name).as_numpy_dtype, may_freeze=True
        )
        self._views: dict[int, NDArray[Any]] = dict(zip(self._forward, views))
        self._places = {index: place for place, index in enumerate(self._forward)}
        self._bundles = self._bundle()
        alone = [(index,) for index in self._forward]
        self._flat = {bundle: self._flat_view(bundle) for bundle in {*self._bundles, *alone}}
        # For each variable whether this rank has its gradient, and then a digest of this rank's assignments.
        self.flags = StepFlags(session, "has_gradient", f"numbers of the optimizer of {agreement.what}", len(variables) + 1)
        self._shares: list[float] = []  # by index: the fraction of ranks that have a gradient in this step
        self._notifying = threading.Lock()  # operations of one graph run in several threads
        self._ended = True
        self._closed = False

    @property
    def forward_order(self) -> Sequence[int]:
        """The indices of the variables, in the order in which the next forward needs them."""
        return self._forward

    def bundles(self, together: Set[int]) -> tuple[Bundle, ...]:
        """All variables in forward order. A bundle stays whole if all its variables are in ``together``."""
        whole = [[bundle] if together >= set(bundle) else [(index,) for index in bundle] for bundle in self._bundles]
        return tuple(itertools.chain.from_iterable(whole))

    def _bundle(self) -> list[Bundle]:
        """Bundle variables whose gradients travel in one partition, as the plan is now. Their averages arrive at the same
        moment, and none of the gradients can be sent before the last one is submitted."""
        manifest, by_tensor = self._group.manifest, self._group.plan.by_tensor
        bundles: list[Bundle] = []
        owners: tuple[int, ...] = ()  # the partitions of the last bundle
        nbytes = 0
        for place, index in enumerate(self._forward):
            nbytes += manifest.tensors[place].nbytes
            if len(owners) == 1 and by_tensor[place] == owners and nbytes <= _MAX_BUNDLE_BYTES:
                bundles[-1] += (index,)
            else:
                bundles.append((index,))
                owners, nbytes = by_tensor[place], manifest.tensors[place].nbytes
        return bundles

    def _flat_view(self, bundle: Bundle) -> NDArray[Any]:
        manifest, places = self._group.manifest, [self._places[index] for index in bundle]
        last = manifest.tensors[places[-1]]
        start, stop = manifest.offset(places[0]), manifest.offset(places[-1]) + last.nbytes
        buffer = self._group.buffers[last.dtype]
        assert isinstance(buffer, memoryview)
        return np.frombuffer(buffer[start:stop], self._views[bundle[0]].dtype)

    def begin(self, has_gradient: Sequence[bool] | NDArray[Any], numbers: Mapping[str, Any], learning_rate: float) -> None:
        """Begin a step. The averages of the previous step must have been used. ``numbers`` are the optimizer's, which must be
        equal on all ranks. Raises UnsupportedError if the previous step was broken off on this rank, and CommschedError if the
        session failed or was closed."""
        if self._closed:
            raise ClosedError("the ScheduledOptimizer was detached, or its session is closed")
        self._session.core.check()
        self.require_ended()
        self._ended = False
        self._group.begin_step()
        self.flags.offer(self._agreement.numbers(numbers, learning_rate), [*has_gradient, self._agreement.take_assigned()])
        for index in reversed(self._forward):
            if not has_gradient[index]:
                self._views[index][...] = 0
                self._notify(index)

    def offer_meeting(self, doing: str) -> None:
        """Say that this rank is ``doing`` this, which is not a step. Call it only after :meth:`require_alike` of the last step,
        and :meth:`require_meeting` before the next step."""
        # Updates of the last step may still be outstanding, so assignments are compared in the next step.
        self.flags.offer(self._agreement.numbers_of_meeting(doing), [0] * (len(self._paths) + 1))

    def require_meeting(self) -> None:
        """Wait until all ranks do what this rank has offered. Raises RanksDiverged if another rank has begun a step instead, in
        which it would wait for this rank for ever, and CommschedError if the session failed or was closed."""
        self.flags.require_same()

    def submit(self, index: int, gradient: NDArray[Any]) -> None:
        """Submit the gradient of the variable with this ``index``. Any thread. Raises UnsupportedError if the gradient and the
        variable have different shapes."""
        view = self._views[index]
        if gradient.shape != view.shape:
            raise UnsupportedError(
                f"the gradient of '{self._paths[index]}' has shape {list(gradient.shape)}, the variable {list(view.shape)}"
            )
        np.copyto(view, gradient)
        self._notify(index)
        if self._submitted is not None:
            self._submitted(self.name_of((index,)))

    def hand_over_bundle(self, bundle: Bundle, gradients: NDArray[Any]) -> None:
        """Submit the gradients of a bundle's variables, flat and one after another. Their sizes must be right. Any thread."""
        np.copyto(self._flat[bundle], gradients)
        for index in reversed(bundle):
            self._notify(index)
        if self._submitted is not None:
            self._submitted(self.name_of(bundle))

    def name_of(self, bundle: Bundle) -> str:
        first, *others = (self._paths[index] for index in bundle)
        return f"{first}{and_more(len(others))}"

    def end(self) -> None:
        """End the step. Its averages must have been used, or be certain to be used even if the graph that runs it fails."""
        self._ended = True

    def require_ended(self) -> None:
        """Require that the last step, if any, has ended. Raises UnsupportedError if the last step was broken off on this rank,
        and CommschedError if the session failed, which broke the step off."""
        if self._ended:
            return
        self._session.core.check()
        self._group.require_whole_step()
        reason = "this rank has not made its update, or not all of it, which others have made"
        raise UnsupportedError(f"step {self._group.step} was broken off: {reason}")

    def _notify(self, index: int) -> None:
        with self._notifying:
            self._group.notify_ready(self._places[index])

    def is_there(self, bundle: Bundle) -> bool:
        """Whether the averages of the bundle's variables are available."""
        proxies = self._group.proxies
        return all(proxies[self._places[index]].is_open for index in bundle)

    @property
    def is_submitted(self) -> bool:
        """Whether this rank has submitted all gradients of the step."""
        return len(self._group.notified) == len(self._forward)

    def all_there(self) -> bool:
        return all(proxy.is_open for proxy in self._group.proxies)

    def stalled(self, bundle: Bundle, seconds: float) -> None:
        """Report that graphs have waited this long for the averages of ``bundle``."""
        closed = [self._places[index] for index in bundle if not self._group.proxies[self._places[index]].is_open]
        if closed:
            self._group.stalled(closed[0], seconds)
        else:
            self.flags.group.stalled(0, seconds)

    def wait(self, index: int) -> None:
        """Wait until the average of the variable with this ``index`` is available. Raises CommschedError if the session failed
        or was closed meanwhile."""
        self._group.proxies[self._places[index]].wait()

    @property
    def step(self) -> int:
        """The number of the step that was begun last."""
        return self._group.step

    def require_alike(self) -> None:
        """Require equal optimizers on all ranks. Call it once in each step, after the flags arrive and before averages are
        used. Raises RanksDiverged if they differ, or the job's earlier failure."""
        self.flags.require_same()
        self._shares = self.flags.means()  # copied: later flags may come before all averages are used
        if self.flags.differs(len(self._paths)):
            self._agreement.compare_assigned(self.flags.group.step)

    def average(self, index: int) -> NDArray[Any]:
        """The average, as a view of the flat buffer. It is valid until the next step begins."""
        return self._views[index]

    def average_of_bundle(self, bundle: Bundle) -> NDArray[Any] | None:
        """The averages of the bundle's variables, one after another, as a view of the flat buffer. Valid until the next step.

        None if no rank has a gradient. Then this rank has none either, so the bundle is a single variable.
        """
        return self._flat[bundle] if self._shares[bundle[0]] > 0 else None

    def share(self, index: int) -> float:
        """The fraction of ranks that have a gradient of the variable with this ``index``."""
        return self._shares[index]

    def close(self, release: bool) -> None:
        """Allow no more steps. ``release``: also release the buffers. The session must then go on, and the averages of the last
        step must have been used."""
        self._closed = True
        if release:
            self._group.release()
            self.flags.group.release()
