"""GradientExchange: gradients into the flat buffers, averages out of them, as operations of whoever runs the step.

What happens in a step, on the host: ``begin`` once; ``hand_over`` for each gradient; ``end`` once their averages are sure to be
used: by the thread of :mod:`.updater`, or as they have been where the optimizer needs all at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import commsched

from ...core.errors import ClosedError, UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, TensorSpec
from ..flat import lay_out
from .guard import own_value
from .initial_state import common_name

#: Indices of variables, one after another in forward order, whose gradients are handed over in one piece, and whose averages
#: arrive so and are used so.
Bundle = tuple[int, ...]

#: What is larger costs more than its handing over: each may then be early by itself.
_MOST_BUNDLE_BYTES = 256 * 1024
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class GradientExchange:
    """The flat buffers of the gradients of ``variables``, which all ranks have, in the same order.

    Beside the gradients travels one flag for each: whether this rank has one. Where it has none it sends zeros, which is what
    it contributes to the joint batch; a variable of which no rank has a gradient is not updated. With the flags travels the
    learning rate, which must be the same on all ranks.

    Collective. Methods that say "eagerly" and those in graphs do the same.

    Args:
        order: the indices of ``variables`` in forward order, as rank 0 has measured it.
        handed_over: is called with a name whenever gradients were.

    Raises:
        UnsupportedError: a variable's type cannot be averaged; names it.
        ManifestMismatch: ranks have different variables.
    """

    def __init__(
        self,
        session: commsched.Session,
        variables: Sequence[Any],
        order: Sequence[int],
        handed_over: Callable[[str], None] | None = None,
    ) -> None:
        for variable in variables:
            if own_value(variable).dtype.name not in _DTYPES:
                raise UnsupportedError(
                    f"variable '{variable.path}' is {own_value(variable).dtype.name}; only gradients of {', '.join(_DTYPES)} "
                    "can be averaged"
                )
        self._session = session
        self._handed_over = handed_over
        self._paths = [variable.path for variable in variables]
        self._forward = [int(index) for index in session.gather([int(index) for index in order])[0]]
        specs = [
            TensorSpec(
                common_name(index, variables[index]), tuple(variables[index].shape), own_value(variables[index]).dtype.name
            )
            for index in self._forward
        ]
        views, self._group = _register(session, specs)
        self._views = dict(zip(self._forward, views))
        self._places = {index: place for place, index in enumerate(self._forward)}
        self._bundles = self._bundle()
        alone = [(index,) for index in self._forward]
        self._flat = {bundle: self._flat_view(bundle) for bundle in {*self._bundles, *alone}}
        # Not float32, which a ``wire`` type would round.
        (self._flags,), self._flag_group = _register(
            session, [TensorSpec("commsched.has_gradient", (len(variables) + 1,), "float64")]
        )
        self._notifying = threading.Lock()  # operations of one graph run in several threads
        self._learning_rate = 0.0
        self._ended = True
        self._closed = False

    @property
    def forward_order(self) -> Sequence[int]:
        """Indices of the variables, that which the next forward needs first before the others."""
        return self._forward

    def bundles(self, together: Set[int]) -> tuple[Bundle, ...]:
        """All variables in forward order, bundled as far as all of a bundle are in ``together``."""
        whole = [[bundle] if together >= set(bundle) else [(index,) for index in bundle] for bundle in self._bundles]
        return tuple(itertools.chain.from_iterable(whole))

    def _bundle(self) -> list[Bundle]:
        """What travels in one partition together, as it is cut now: it is there at the same moment, and none of it can leave
        before the last gradient is handed over."""
        manifest, by_tensor = self._group.manifest, self._group.plan.by_tensor
        bundles: list[Bundle] = []
        owners: tuple[int, ...] = ()  # of the last bundle
        nbytes = 0
        for place, index in enumerate(self._forward):
            nbytes += manifest.tensors[place].nbytes
            if len(owners) == 1 and by_tensor[place] == owners and nbytes <= _MOST_BUNDLE_BYTES:
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

    def begin(self, has_gradient: Sequence[bool] | NDArray[Any], learning_rate: float) -> None:
        """Begin a step. Averages of the step before must have been used.

        Raises:
            UnsupportedError: the step before was broken off on this rank.
            CommschedError: the session failed or was closed.
        """
        if self._closed:
            raise ClosedError("the ScheduledOptimizer was detached, or its session is closed")
        self._session.core.check()
        self.require_ended()
        self._ended = False
        self._learning_rate = float(learning_rate)
        self._group.begin_step()
        self._flag_group.begin_step()
        self._flags[:-1] = has_gradient
        self._flags[-1] = self._learning_rate
        with self._notifying:
            self._flag_group.notify_ready(0)
        for index in reversed(self._forward):
            if not has_gradient[index]:
                self._views[index][...] = 0
                self._notify(index)

    def hand_over(self, index: int, gradient: NDArray[Any]) -> None:
        """The gradient of the variable with this ``index``. Any thread."""
        view = self._views[index]
        if gradient.shape != view.shape:
            raise UnsupportedError(
                f"the gradient of '{self._paths[index]}' has shape {list(gradient.shape)}, the variable {list(view.shape)}"
            )
        np.copyto(view, gradient)
        self._notify(index)
        if self._handed_over is not None:
            self._handed_over(self.name_of((index,)))

    def hand_over_bundle(self, bundle: Bundle, gradients: NDArray[Any]) -> None:
        """Those of its variables, one after another, of the right shapes. Any thread."""
        np.copyto(self._flat[bundle], gradients)
        for index in reversed(bundle):
            self._notify(index)
        if self._handed_over is not None:
            self._handed_over(self.name_of(bundle))

    def name_of(self, bundle: Bundle) -> str:
        first, *others = (self._paths[index] for index in bundle)
        return f"{first} and {len(others)} more" if others else f"{first}"

    def end(self) -> None:
        """The averages of the step are used, or will be, whatever becomes of the graph that runs it."""
        self._ended = True

    def require_ended(self) -> None:
        """
        Raises:
            UnsupportedError: the last step was broken off on this rank.
        """
        if self._ended:
            return
        group = self._group
        missing = len(self._forward) - len(group.notified)
        if missing:  # the others wait for these: going on could only hang
            reason = f"{missing} of its gradients were never computed here, and other ranks wait for them"
        else:
            reason = "this rank has not made its update, or not all of it, which others have made"
        raise UnsupportedError(f"step {group.step} was broken off: {reason}")

    def _notify(self, index: int) -> None:
        with self._notifying:
            self._group.notify_ready(self._places[index])

    def is_there(self, bundle: Bundle) -> bool:
        """Whether the averages of its variables are."""
        proxies = self._group.proxies
        return all(proxies[self._places[index]].is_open for index in bundle) and self._flag_group.proxies[0].is_open

    def all_there(self) -> bool:
        return all(proxy.is_open for proxy in self._group.proxies) and self._flag_group.proxies[0].is_open

    def wait(self, index: int) -> None:
        """Until the average of the variable with this ``index`` is there.

        Raises:
            CommschedError: the session failed or was closed meanwhile.
        """
        self._flag_group.proxies[0].wait()
        self._group.proxies[self._places[index]].wait()

    def require_same_learning_rate(self) -> None:
        """Once any average is there.

        Raises:
            UnsupportedError: ranks have different learning rates, or it is NaN.
        """
        if not abs(self._flags[-1] - self._learning_rate) <= 1e-6 * abs(self._learning_rate):
            raise UnsupportedError(
                f"the learning rate is {self._learning_rate:.6g} here, and {self._flags[-1]:.6g} on average over ranks: set it "
                "alike on all (a callback must go by what all ranks see)"
            )

    def average(self, index: int) -> NDArray[Any]:
        """The average, in the flat buffer: it is valid until the next step begins."""
        return self._views[index]

    def average_of_bundle(self, bundle: Bundle) -> NDArray[Any] | None:
        """Likewise those of its variables, one after another. None: no rank has a gradient, which can only be where this one
        has none, so of a variable alone."""
        return self._flat[bundle] if self._flags[bundle[0]] > 0 else None

    def share(self, index: int) -> float:
        """Of the ranks, have a gradient of the variable with this ``index``."""
        return float(self._flags[index])

    def close(self, release: bool) -> None:
        """No step is to come. ``release``: the session goes on, and the last step was used."""
        self._closed = True
        if release:
            self._group.release()
            self._flag_group.release()


def _register(session: commsched.Session, specs: Sequence[TensorSpec]) -> tuple[list[NDArray[Any]], TensorGroup]:
    manifest = Manifest(tuple(specs))
    buffers, views = lay_out(manifest, lambda dtype: tf.as_dtype(dtype).as_numpy_dtype)
    return views, session.register(manifest, buffers)
