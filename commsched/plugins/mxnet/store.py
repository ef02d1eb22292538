"""ScheduledStore: a kvstore of MXNet whose sums over the ranks are scheduled."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import mxnet as mx

import commsched

from ...core.comparison import require_same
from ...core.errors import ManifestMismatch, UnsupportedError
from ..common.collectives import broadcast_arrays, gather_alike
from .agreement import RoundOutcome, describe_optimizer, digest_states, numbers_of, prepare_optimizer, require_equal_optimizers
from .key_exchange import KeyExchange
from .parameters import digest_of_array, dtype_name, require_averageable_array, require_dense, spec_of

#: With one device, MXNet creates no kvstore whose name lacks "dist". If the type also contains "_sync", a Module divides by the
#: batch size of all workers.
NAME = "dist_sync_commsched"

StoreKey: TypeAlias = int | str
Arrays: TypeAlias = Any  #: an NDArray, or a list of one


class ScheduledStore(mx.kv.KVStoreBase):  # type: ignore[misc]
    """The kvstore that ``mx.kv.create("dist_sync_commsched")`` returns, for ``gluon.Trainer``, ``Module`` and custom loops.

    As with ``dist_sync``, the pushes of all workers are summed, and the optimizer that is set updates the weights. The update
    runs in each process, in MXNet's own engine: ``pushpull`` queues sums and updates and returns. A read of a weight waits for
    the update of that weight only. Keys of higher priority are sent first. Every step must push every key once, in the order of
    the first step, which must be the same on all ranks. With one rank, or with ``COMMSCHED_DISABLE=1``, nothing is sent.

    ``broadcast``, ``init``, ``set_optimizer`` and the first step are collective. Use the store from one thread.

    Args:
        session: the session to use instead of the session of ``commsched.init()``.
    """

    def __init__(self, session: commsched.Session | None = None) -> None:
        self._session = session or commsched.init()
        self._updater: mx.optimizer.Updater | None = None  # under the name that gluon.Trainer looks for
        self._loaded = 0
        self._names: dict[StoreKey, str] = {}
        self._begun_with: set[StoreKey] = set()  # keys that were broadcast
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

    # --- initial values ---

    def broadcast(self, key: StoreKey, value: Arrays, out: Arrays, priority: int = 0) -> None:
        """Put rank 0's ``value`` into ``out`` on all ranks. Collective.

        Raises:
            UnsupportedError: ``value`` is not dense, the key was broadcast before, or a step was begun and not completed.
            ManifestMismatch: ranks differ in key, shape or type; or ``out`` is a weight whose backward has run on some rank
                with another value than rank 0's.
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

    def init(self, key: StoreKey, value: Arrays) -> None:
        """Require that ``value`` is equal on all ranks. Collective.

        A Module calls this instead of ``broadcast`` if its updates are not on the kvstore. It takes no values from the kvstore.

        Raises:
            UnsupportedError: see :meth:`broadcast`.
            ManifestMismatch: ``value`` differs between ranks.
        """
        require_same(
            self._gather_values(key, self._only(key, value), used=False),
            lambda different: (
                f"{self._name(key)} has another value on rank {different.rank} than on rank 0, and without the optimizer on "
                "the kvstore (MXNET_UPDATE_ON_KVSTORE=0) a Module takes no values from it: begin alike on all ranks"
            ),
        )

    def _gather_values(self, key: StoreKey, value: mx.nd.NDArray, used: bool) -> list[list[Any]]:
        """Return the digest of ``value`` and ``used`` of each rank."""
        name = self._name(key)
        if key in self._begun_with:
            raise UnsupportedError(f"{name} was broadcast before: create a kvstore for each Trainer, Module or loop")
        self._begun_with.add(key)
        digest = digest_of_array(value)
        if self._keys is None:
            return [[digest, used]]
        require_dense(name, value)
        self._keys.require_all_pushed(f"{name} is broadcast")
        mine = [f"{list(value.shape)} of {dtype_name(value.dtype)}", digest, used]
        records = gather_alike(self._session, f"broadcasts {name}", mine, "use the kvstore alike on all ranks")
        require_same([record[0] for record in records], lambda different: f"{name}: the shape and type is {different.text()}")
        return [[digest, used] for _, digest, used in records]

    # --- steps ---

    def pushpull(self, key: StoreKey, value: Arrays, out: Arrays | None = None, priority: int = 0) -> None:
        """Queue the sum of ``value`` over all ranks. In the first step, wait for it.

        If an optimizer is set, it updates the weight ``out`` with the sum. Otherwise the sum is written to ``out``, or to
        ``value`` if ``out`` is ``None``.

        Raises:
            UnsupportedError: there are several devices, or an array is not dense or not of a floating type; or the key is new,
                or the shape or order differs from the first step. Says which.
            RanksDiverged: ranks did different things, or their weights differ.
            ManifestMismatch: ranks push different keys, or update different weights. In the first step only.
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
        weight = None if self._updater is None else result
        average = keys.average(spec_of(name, gradient), priority, gradient, weight, self._done, partial(self._alike, result))
        flat = average.reshape((-1,))  # a scalar, too, becomes an array of one dimension
        # A product with a Python number would hold one of the few pieces of temporary memory that all operations share until it
        # is computed, and the next forward would wait for that memory. Therefore the factor is an array.
        mx.nd.broadcast_mul(flat, mx.nd.full((1,), self.num_workers, dtype=flat.dtype), out=flat)
        return average

    def _done(self) -> RoundOutcome:
        if self._updater is None:
            return RoundOutcome()
        return RoundOutcome(loaded=self._loaded, numbers=numbers_of(self._updater.optimizer))

    def _alike(self, result: mx.nd.NDArray) -> dict[str, Any]:
        if self._updater is None:
            return {"the optimizer": None}
        optimizer = self._updater.optimizer
        return {
            "the optimizer": type(optimizer).__name__,
            "its rescale_grad (of the batch size)": float(optimizer.rescale_grad),
            "its learning rate": float(optimizer.learning_rate),
            "the weight (a digest)": digest_of_array(result),
        }

    def push(self, *_: Any, **__: Any) -> None:
        """Not supported: raises UnsupportedError."""
        raise UnsupportedError("push() and pull() apart are not supported; call pushpull(), and broadcast() in place of init()")

    pull = row_sparse_pull = push

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Not supported: raises UnsupportedError."""
        raise UnsupportedError("gradient compression is not supported (compression_params); see the setting 'wire'")

    # --- the optimizer ---

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Update weights with ``optimizer`` from now on. Uses this object, not a copy. Collective.

        Raises:
            UnsupportedError: the optimizer is SGLD, or a step was begun and not completed.
            ManifestMismatch: the optimizers of the ranks differ.
        """
        if self._keys is not None:
            prepare_optimizer(optimizer)
            self._keys.require_all_pushed("an optimizer is set")
            doing = "sets the optimizer of a kvstore"
            require_equal_optimizers(
                gather_alike(self._session, doing, describe_optimizer(optimizer), "use the kvstore alike on all ranks")
            )
        self._updater = mx.optimizer.get_updater(optimizer)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Save the states of this rank's optimizer, as the kvstore ``local`` does. The states are the same on all ranks.

        Raises:
            UnsupportedError: no optimizer is set.
        """
        states = self._require_updater().get_states(dump_optimizer)  # before the file is emptied
        with open(fname, "wb") as file:
            file.write(states)

    def load_optimizer_states(self, fname: str) -> None:
        """Load the states of the optimizer, as the kvstore ``local`` does.

        All ranks must load the same states. Otherwise the step after the next one raises ``RanksDiverged``.

        Raises:
            UnsupportedError: no optimizer is set.
        """
        updater = self._require_updater()
        with open(fname, "rb") as file:
            updater.set_states(file.read())
        if self._keys is not None:
            prepare_optimizer(updater.optimizer)  # the saved file may have replaced the optimizer
            self._loaded += digest_states(updater.states)

    def _require_updater(self) -> mx.optimizer.Updater:
        if self._updater is None:
            raise UnsupportedError("no optimizer is set: its states are not on the kvstore")
        return self._updater

    # ---

    def _name(self, key: StoreKey) -> str:
        """Return the name of ``key`` in messages. It does not change later.

        It includes the name of the parameter if a Trainer has given that to the optimizer.
        """
        if key not in self._names:
            parameters = self._updater.optimizer.param_dict if self._updater is not None else {}
            self._names[key] = f"key {key!r}" + (f" ({parameters[key].name})" if key in parameters else "")
        return self._names[key]

    def _only(self, key: StoreKey, arrays: Arrays) -> mx.nd.NDArray:
        if not isinstance(key, (int, str)):
            raise UnsupportedError(f"one key at a time, not {key!r}")
        if not isinstance(arrays, (list, tuple)):
            arrays = [arrays]
        if len(arrays) != 1:
            raise UnsupportedError(
                f"{self._name(key)} comes from {len(arrays)} devices: commsched takes one process for each device"
            )
        return arrays[0].as_nd_ndarray()  # an mx.np.ndarray keeps its memory


mx.kv.KVStoreBase.kv_registry[NAME] = ScheduledStore
