"""ScheduledStore: the kvstore of MXNet, whose sums over the ranks are scheduled."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any, TypeAlias

import mxnet as mx

import commsched

from ...core.errors import ManifestMismatch, UnsupportedError
from ...core.manifest import TensorSpec
from ..beginning import broadcast_arrays
from .agreement import Done
from .described import describe, digest_numbers, digest_states, prepare, require_equal_optimizers
from .initial import gather_alike, require_alike
from .key_exchange import KeyExchange
from .slot import dtype_name, require_averageable_array, require_dense

#: Where there is one device MXNet makes no kvstore of a name without "dist"; and with "_sync" in its type too, a Module divides
#: by the batch of all workers.
NAME = "dist_sync_commsched"

Key: TypeAlias = int | str
Arrays: TypeAlias = Any  #: an NDArray, or a list of one


class ScheduledStore(mx.kv.KVStoreBase):  # type: ignore[misc]
    """What ``mx.kv.create("dist_sync_commsched")`` gives; for ``gluon.Trainer``, ``Module`` and loops of one's own.

    As with ``dist_sync``, pushes of all workers are added up, and the optimizer that is set updates the weights. It does so in
    each process, in MXNet's own engine: ``pushpull`` queues sums and updates and returns, and whoever reads a weight waits for
    exactly that one. Keys of higher priority go first. In each step every key is pushed once, in the order of the first step,
    the same on all ranks. With one rank, or with ``COMMSCHED_DISABLE=1``, nothing is sent.

    ``broadcast``, ``init``, ``set_optimizer`` and the first step are collective. Use it from one thread.

    Args:
        session: a session other than that of ``commsched.init()``.
    """

    def __init__(self, session: commsched.Session | None = None) -> None:
        self._session = session or commsched.init()
        self._updater: mx.optimizer.Updater | None = None  # under the name that gluon.Trainer looks for
        self._loaded = 0
        self._names: dict[Key, str] = {}
        self._begun_with: set[Key] = set()  # those that were broadcast
        self._keys: KeyExchange | None = None if self._session.world_size == 1 else KeyExchange(self._session)

    @property
    def type(self) -> str:
        return NAME

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def num_workers(self) -> int:
        return self._session.world_size

    def is_capable(self, capability: str) -> bool:
        if capability.lower() == self.OPTIMIZER:
            return True
        raise ValueError(f"unknown capability: {capability}")

    # --- values to begin with ---

    def broadcast(self, key: Key, value: Arrays, out: Arrays, priority: int = 0) -> None:
        """Put rank 0's ``value`` into ``out`` on all ranks. Collective.

        Raises:
            UnsupportedError: it is not dense, or the key was broadcast before, or a step was begun and not ended.
            ManifestMismatch: ranks differ in key, shape or type; or ``out`` is a weight whose backward has run with another
                value than rank 0's.
        """
        value = self._only(key, value)
        outs = out if isinstance(out, (list, tuple)) else [out]
        digests = self._gather_values(key, value, used=any(array._fresh_grad for array in outs))
        for rank, (digest, used) in enumerate(digests):
            if used and digest != digests[0][0]:
                raise ManifestMismatch(
                    f"{self._name(key)} had another value on rank {rank} than on rank 0 when backward ran: begin alike (the "
                    "same mx.random.seed() before initialize(), or the same file on all ranks), or use ScheduledTrainer, whose "
                    "ranks all begin with rank 0's values"
                )
        if any(digest != digests[0][0] for digest, _ in digests):
            (received,) = broadcast_arrays(self._session, self._name(key), [value.asnumpy()])
            value = mx.nd.array(received, dtype=received.dtype)
        for array in outs:
            if array is not value:
                value.copyto(array.as_nd_ndarray())

    def init(self, key: Key, value: Arrays) -> None:
        """What a Module calls instead of ``broadcast`` where updates are not on the kvstore: it does not let values be changed.

        Raises:
            UnsupportedError: see :meth:`broadcast`.
            ManifestMismatch: ``value`` differs between ranks.
        """
        for rank, (digest, _) in enumerate(digests := self._gather_values(key, self._only(key, value), used=False)):
            if digest != digests[0][0]:
                raise ManifestMismatch(
                    f"{self._name(key)} has another value on rank {rank} than on rank 0, and without the optimizer on the "
                    "kvstore (MXNET_UPDATE_ON_KVSTORE=0) a Module takes no values from it: begin alike on all ranks"
                )

    def _gather_values(self, key: Key, value: mx.nd.NDArray, used: bool) -> list[list[Any]]:
        """Of each rank: a digest of ``value``, and ``used``."""
        name = self._name(key)
        if key in self._begun_with:
            raise UnsupportedError(f"{name} was broadcast before: create a kvstore for each Trainer, Module or loop")
        self._begun_with.add(key)
        digest = _digest(value)
        if self._keys is None:
            return [[digest, used]]
        require_dense(name, value)
        self._keys.require_all_pushed(f"{name} is broadcast")
        mine = [{"the shape and type": f"{list(value.shape)} of {dtype_name(value.dtype)}"}, digest, used]
        records = gather_alike(self._session, f"broadcasts {name}", mine, "use the kvstore alike on all ranks")
        require_alike(name, [alike for alike, _, _ in records])
        return [[digest, used] for _, digest, used in records]

    # --- steps ---

    def pushpull(self, key: Key, value: Arrays, out: Arrays | None = None, priority: int = 0) -> None:
        """Queue the sum of ``value`` over all ranks. With an optimizer set it updates ``out``, the weight; else the sum is in
        ``out``, or in ``value`` if there is none. In the first step it waits.

        Raises:
            UnsupportedError: several devices, or not dense, or of another type than floats; a new key, another shape, or
                another order than in the first step; ranks have parted. Says which.
            ManifestMismatch: ranks push other keys, or update other weights; in the first step.
            CommschedError: the session failed or was closed.
        """
        gradient = self._only(key, value)
        result = gradient if out is None else self._only(key, out)
        name = self._name(key)
        if self._keys is not None:
            for array in (gradient, result):
                require_averageable_array(name, array)
        if result.shape != gradient.shape:
            raise UnsupportedError(f"{name} is pushed with shape {list(gradient.shape)}, and pulled with {list(result.shape)}")
        if self._updater is not None and out is None:
            raise UnsupportedError(f"{name} is pushed without out, the weight that the optimizer is to update")
        total = gradient if self._keys is None else self._add_up(self._keys, name, priority, gradient, result)
        if self._updater is not None:
            self._updater(key, total, result)
        elif total is not result:
            total.copyto(result)

    def _add_up(
        self, keys: KeyExchange, name: str, priority: int, gradient: mx.nd.NDArray, result: mx.nd.NDArray
    ) -> mx.nd.NDArray:
        average = keys.average(_spec(name, gradient), priority, gradient, self._done, partial(self._alike, result))
        flat = average.reshape((-1,))  # of a scalar, too
        # Not times a number: until it is done, that keeps one of the few pieces of temporary memory that all operations share,
        # and the next forward would wait for it.
        mx.nd.broadcast_mul(flat, mx.nd.full((1,), self.num_workers, dtype=flat.dtype), out=flat)
        return average

    def _done(self) -> Done:
        if self._updater is None:
            return Done()
        optimizer = self._updater.optimizer
        return Done(
            rescale_grad=optimizer.rescale_grad,
            learning_rate=optimizer.learning_rate,
            loaded=self._loaded,
            numbers=digest_numbers(optimizer),
        )

    def _alike(self, result: mx.nd.NDArray) -> dict[str, Any]:
        if self._updater is None:
            return {"the optimizer": None}
        optimizer = self._updater.optimizer
        return {
            "the optimizer": type(optimizer).__name__,
            "its rescale_grad (of the batch size)": float(optimizer.rescale_grad),
            "its learning rate": float(optimizer.learning_rate),
            "the weight (a digest)": _digest(result),
        }

    def push(self, *_: Any, **__: Any) -> None:
        """
        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("push() and pull() apart are not supported; call pushpull(), and broadcast() in place of init()")

    pull = row_sparse_pull = push

    def set_gradient_compression(self, compression_params: Any) -> None:
        """
        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("gradient compression is not supported (compression_params); see the setting 'wire'")

    # --- the optimizer ---

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Have ``optimizer``, this very one, update weights from now on. Collective.

        Raises:
            UnsupportedError: it is SGLD.
            ManifestMismatch: the ranks' differ.
        """
        if self._keys is not None:
            prepare(optimizer)
            self._keys.require_all_pushed("an optimizer is set")
            doing = "sets the optimizer of a kvstore"
            require_equal_optimizers(
                gather_alike(self._session, doing, describe(optimizer), "use the kvstore alike on all ranks")
            )
        self._updater = mx.optimizer.get_updater(optimizer)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """As the kvstore ``local`` does; this rank's, which are the same on all.

        Raises:
            UnsupportedError: no optimizer is set.
        """
        states = self._require_updater().get_states(dump_optimizer)  # before the file is emptied
        with open(fname, "wb") as file:
            file.write(states)

    def load_optimizer_states(self, fname: str) -> None:
        """As the kvstore ``local`` does; the same on all ranks, else the next step but one says so.

        Raises:
            UnsupportedError: no optimizer is set.
        """
        updater = self._require_updater()
        with open(fname, "rb") as file:
            updater.set_states(file.read())
        if self._keys is not None:
            prepare(updater.optimizer)  # it may be the one that was saved
            self._loaded += digest_states(updater.states)

    def _require_updater(self) -> mx.optimizer.Updater:
        if self._updater is None:
            raise UnsupportedError("no optimizer is set: its states are not on the kvstore")
        return self._updater

    # ---

    def _name(self, key: Key) -> str:
        """What it is called in messages, for as long as this is: with the parameter's name, where a Trainer tells it."""
        if key not in self._names:
            parameters = self._updater.optimizer.param_dict if self._updater is not None else {}
            self._names[key] = f"key {key!r}" + (f" ({parameters[key].name})" if key in parameters else "")
        return self._names[key]

    def _only(self, key: Key, arrays: Arrays) -> mx.nd.NDArray:
        if not isinstance(key, (int, str)):
            raise UnsupportedError(f"one key at a time, not {key!r}")
        if not isinstance(arrays, (list, tuple)):
            arrays = [arrays]
        if len(arrays) != 1:
            raise UnsupportedError(
                f"{self._name(key)} comes from {len(arrays)} devices: commsched takes one process for each device"
            )
        return arrays[0].as_nd_ndarray()  # of an mx.np.ndarray: the same memory


mx.kv.KVStoreBase.kv_registry[NAME] = ScheduledStore


def _spec(name: str, array: mx.nd.NDArray) -> TensorSpec:
    return TensorSpec(name, tuple(array.shape), dtype_name(array.dtype))


def _digest(array: mx.nd.NDArray) -> str:
    return hashlib.blake2b(array.asnumpy().tobytes(), digest_size=16).hexdigest()
