"""Schedule: the state and methods that a ScheduledOptimizer adds to the user's optimizer while it averages gradients."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import keras
import tensorflow as tf

import commsched

from ...core.comparison import require_same
from ...core.errors import ConfigError, ManifestMismatch, UnsupportedError
from ..common.collectives import require_same_owner
from .agreement import Agreement, broadcast_variables, common_name, numbers_of, require_same_optimizer, without_numbers
from .exchange import GradientExchange
from .gate import refuse_xla
from .guard import guard, is_guarded, own_value, release, settle, settle_at_calls, unguarded
from .logs import hook_fit, leave_fit, meet_in
from .step import Step
from .timeline import Timeline
from .update import Updates, constraints, hyper_parameters, why_all_at_once
from .updater import Updater, call_if_alive

log = logging.getLogger("commsched")

#: Compiled updates are kept for so many hyper-parameters, which may alternate. A schedule may make new ones in every step.
_MOST_UPDATES = 8

#: The operation of TensorFlow that has made a gradient which a loop has clipped. Those within a model are in the scope of a
#: tape, or of ``tf.gradients``.
_CLIPPED = re.compile(
    r"^(?!(?:.*/)?gradient(?:_tape|s)(?:_\d+)?/)"  # not within a model
    r".*\b(clip_by_(?:global_norm|norm|value|average_norm))(?:_\d+)?(?:/_\d+)?$"
)

_made: WeakKeyDictionary[commsched.Session, list[ref[Schedule]]] = WeakKeyDictionary()  # making one is collective


class Schedule:
    """Averages gradients for ``optimizer``, whose own class is ``kind``. Making one is collective.

    The flat buffers are made with the first step, when the first forward has shown the order of the layers.

    Raises:
        UnsupportedError, ManifestMismatch, ConfigError: see ScheduledOptimizer.
    """

    def __init__(
        self,
        session: commsched.Session,
        kind: type,
        optimizer: Any,
        model: Any,
        variables: Sequence[Any],
        per_parameter: bool | None,
    ) -> None:
        self.session = session
        self.variables = list(variables)
        self.ended = False
        self.replaced = False
        self._kind = kind
        self._optimizer = optimizer
        self._model = model
        self._per_parameter = per_parameter
        number, earlier = self._earlier()
        if earlier is None:
            self._require_free()
        self._require_plain()
        self.why_all_at_once = why_all_at_once(kind, optimizer, per_parameter)
        if self.why_all_at_once is not None and session.rank == 0:
            log.info("%s: each step waits for all averages", self.why_all_at_once)
        if earlier is not None:
            earlier.offer_meeting("makes another ScheduledOptimizer")  # which a rank that trains on with it finds
        # If this one is refused for another reason, that is so on all ranks, and the earlier one may go on.
        require_end = None if earlier is None else earlier.require_meeting
        require_same_owner(session, number, "the optimizer's variables belong", "ScheduledOptimizer", require_end)
        require_same_optimizer(session, kind, optimizer)
        self._require_same_variables()
        if earlier is not None:
            earlier.detach()
            earlier.replaced = True
        for variable in [*model.variables, *optimizer.variables]:
            settle(variable)  # an outstanding update of another ScheduledOptimizer would come after the broadcast
        broadcast_variables(session, "initial weights", model.weights)
        broadcast_variables(session, "initial optimizer state", optimizer.variables)
        self._indices = {id(own_value(variable)): index for index, variable in enumerate(self.variables)}
        self._agreement = self._agree()
        self._updater = Updater(session, [own_value(variable) for variable in self.variables], self._agreement)
        self._timeline = Timeline(session.observer, self._updater.signals, model) if session.observer is not None else None
        self._step: Step | None = None
        self._updates: dict[Any, Updates] = {}  # by hyper-parameters and constraints
        self._order: dict[int, None] = {}  # indices by first use
        self._guard()
        # Functions that were traced before would wait for all variables before they begin.
        model.train_function = model.test_function = model.predict_function = None
        hook_fit(session, model, lambda used: getattr(used, "is_averaging", False))
        meet_in(session, self.meet)
        self._forget = session.on_close(self._finish)
        session.cleanup.callback(partial(call_if_alive, WeakMethod(self._updater.close)))

    def _earlier(self) -> tuple[int | None, Schedule | None]:
        """The number of an earlier ScheduledOptimizer of exactly these variables, such as one from an earlier run of a
        notebook's cell, and its Schedule. None and None if there is none."""
        for number, known in enumerate(_made.get(self.session, ())):
            other = known()
            if other is not None and not other.ended and set(map(id, other.variables)) == set(map(id, self.variables)):
                return number, other
        return None, None

    def _require_free(self) -> None:
        for variable in self.variables:
            if is_guarded(variable):
                raise ConfigError(
                    f"variable '{variable.path}' belongs to another ScheduledOptimizer; call that one's detach() first"
                )

    def _require_same_variables(self) -> None:
        """Require that all ranks train the same variables of the model: others of the same shape would be averaged with each
        other. Raises ManifestMismatch."""
        places = {id(variable): place for place, variable in enumerate(self._model.variables)}
        trained = [common_name(places[id(variable)], variable) for variable in self.variables]
        require_same(
            self.session.gather(trained),
            lambda different: (
                f"the optimizer trains {different.text(_of_the_model)}; freeze the same layers on all ranks, before the "
                "optimizer is given to ScheduledOptimizer"
            ),
        )

    def _require_plain(self) -> None:
        known = {id(variable) for variable in self._model.variables}
        for variable in self.variables:
            if id(variable) not in known:
                raise ManifestMismatch(f"variable '{variable.path}' of the optimizer is not in the model '{self._model.name}'")
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedError(
                    f"variable '{variable.path}' is overwritten by its gradient (float8), which is not averaged"
                )

    def _agree(self) -> Agreement:
        variables = [*self.variables, *self._state()]
        made = _made.setdefault(self.session, [])
        made.append(ref(self))
        number = len(made)
        return Agreement(
            self.session,
            f"{'the model' if number == 1 else f'model {number},'} '{without_numbers(self._model.name)}'",
            [common_name(index, variable) for index, variable in enumerate(variables)],
            [own_value(variable) for variable in variables],
            len(self.variables),
            own_value(self._optimizer.own_iterations),
            reads_iterations=self.why_all_at_once is None,
        )

    def _state(self) -> list[Any]:
        """The optimizer's variables that the update of a single variable changes. Empty if updates are made all at once."""
        counters = [self._optimizer.own_iterations, self._optimizer.own_learning_rate]
        if self.why_all_at_once is not None:
            return []
        return [variable for variable in self._optimizer.variables if not any(variable is counter for counter in counters)]

    def _guard(self) -> None:
        settles: list[Callable[[], None]] = [partial(self._settle, index) for index in range(len(self.variables))]
        state = self._state()
        settles += [self._updater.make_settle(own_value(variable)) for variable in state]
        for index, (variable, settle_it) in enumerate(zip([*self.variables, *state], settles)):
            guard(variable, settle_it, partial(self._agreement.assigned, index))
        guarded = [variable for variable in [*self.variables, *self._optimizer.variables] if is_guarded(variable)]
        settle_at_calls(
            [
                *((own_value(variable), partial(settle, variable)) for variable in guarded),
                (own_value(self._optimizer.own_iterations), partial(_refuse_earlier_step, self._optimizer)),
            ]
        )

    def _settle(self, index: int) -> None:
        if self._step is None:
            self._order.setdefault(index)
        if self.why_all_at_once is None:
            self._updater.gates[index].settle()

    # --- one step ---

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """See ScheduledOptimizer."""
        by_index = self._by_index("apply", gradients, variables)
        _require_unclipped(gradients, variables)
        step = self._first_step() if self._step is None else self._step
        if self.why_all_at_once is not None:
            averages = step.averages(by_index, numbers_of(self._optimizer), self._learning_rate())
            self._apply_averages([averages[index] for index in averages], [self.variables[index] for index in averages])
            step.end(self._changed())
            return
        learning_rate = self._learning_rate()
        step.deferred(by_index, self._updates_for(learning_rate), learning_rate)

    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See ScheduledOptimizer."""
        self._require_all_at_once("average")
        by_index = self._by_index("average", gradients, variables)
        step = self._first_step() if self._step is None else self._step
        averages = step.averages(by_index, numbers_of(self._optimizer), self._learning_rate())
        with tf.control_dependencies([*averages.values()]):  # they are copies, so nothing of the step is used any more
            step.end(self._changed())
        return [averages.get(self._index(variable)) for variable in variables]

    def apply_averages(self, averages: Sequence[Any], variables: Sequence[Any]) -> None:
        """See ScheduledOptimizer."""
        self._require_all_at_once("apply_averages")
        self._require_supported("apply_averages")
        for variable in variables:
            self._index(variable)
        self._apply_averages(averages, variables)

    def _require_all_at_once(self, caller: str) -> None:
        if self.replaced:
            raise UnsupportedError("another ScheduledOptimizer was made for the same variables: use that one")
        if self.why_all_at_once is None:
            raise UnsupportedError(
                f"{caller}() is for all averages at once, but this optimizer updates each variable when its own arrives: "
                "ScheduledOptimizer(optimizer, model, per_parameter=False)"
            )

    def _apply_averages(self, averages: Sequence[Any], variables: Sequence[Any]) -> None:
        with unguarded():  # updates assign the same values on all ranks, so their assignments need no comparison
            self._optimizer.apply_plainly(averages, variables)

    def _changed(self) -> list[tf.Variable]:
        """The variables that an update changes."""
        return [own_value(variable) for variable in [*self.variables, *self._optimizer.variables]]

    def _by_index(self, caller: str, gradients: Sequence[Any], variables: Sequence[Any]) -> dict[int, tf.Tensor]:
        """The gradients that there are, by index of variable; raises what ``caller`` must not be given."""
        if self.replaced:
            raise UnsupportedError("another ScheduledOptimizer was made for the same variables: use that one")
        self._require_supported(caller)
        indices = [self._index(variable) for variable in variables]
        if len(set(indices)) < len(indices) or len(gradients) != len(variables):
            raise UnsupportedError(f"{caller}() must be given one gradient for each variable, and each variable once")
        by_index = {index: self._dense(index, gradient) for index, gradient in zip(indices, gradients) if gradient is not None}
        if not by_index:
            raise ValueError("No gradients provided for any variable.")
        return by_index

    def _require_supported(self, caller: str) -> None:
        if tf.distribute.has_strategy():
            raise UnsupportedError(
                f"{type(tf.distribute.get_strategy()).__name__} is active: it distributes training itself; use one or the other"
            )
        if not tf.executing_eagerly():
            refuse_xla(tf.compat.v1.get_default_graph(), f"{caller}() is called")
        outer = getattr(self._model, "optimizer", None)
        if isinstance(outer, keras.optimizers.LossScaleOptimizer) and outer.inner_optimizer is self._optimizer:
            raise UnsupportedError(
                "the loss scale must be decided by averages: ScheduledOptimizer(LossScaleOptimizer(optimizer), model), which "
                "compile() does not wrap again"
            )
        if self.why_all_at_once is None and (why := why_all_at_once(self._kind, self._optimizer, self._per_parameter)):
            raise UnsupportedError(f"{why}, which must be set before the optimizer is given to ScheduledOptimizer")

    def _index(self, variable: Any) -> int:
        value = own_value(variable) if isinstance(variable, keras.Variable) else variable
        index = self._indices.get(id(value))
        if index is None:
            raise UnsupportedError(
                f"variable '{getattr(variable, 'path', variable.name)}' is not one of those that are averaged, since it was "
                f"not trainable, or not in the model '{self._model.name}', when the optimizer was given to ScheduledOptimizer"
            )
        return index

    def _dense(self, index: int, gradient: Any) -> tf.Tensor:
        variable = self.variables[index]
        dense = tf.cast(tf.convert_to_tensor(gradient), own_value(variable).dtype)
        if not dense.shape.is_compatible_with(variable.shape):
            raise UnsupportedError(
                f"the gradient of '{variable.path}' has shape {list(dense.shape)}, the variable {list(variable.shape)}"
            )
        return dense

    def _first_step(self) -> Step:
        with tf.init_scope():
            rest = [index for index in range(len(self.variables)) if index not in self._order]
            submitted = None if self._timeline is None else self._timeline.submitted
            exchange = GradientExchange(self.session, self.variables, [*self._order, *rest], self._agreement, submitted)
            self._updater.exchange = exchange
            paths = [variable.path for variable in self.variables]
            self._step = Step(exchange, self._updater, self._agreement, paths, own_value(self._optimizer.own_iterations))
        return self._step

    def _learning_rate(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._optimizer.learning_rate)

    def _updates_for(self, learning_rate: tf.Tensor) -> Updates:
        key = (hyper_parameters(self._optimizer), constraints(self.variables), learning_rate.dtype)
        updates = self._updates.pop(key, None)
        if updates is None:
            if len(self._updates) == _MOST_UPDATES:  # steps that were traced with it, or are outstanding, hold it themselves
                del self._updates[next(iter(self._updates))]
            with unguarded():
                updates = Updates(self._optimizer, self.variables, tf.TensorSpec((), learning_rate.dtype))
        self._updates[key] = updates  # the last to be deleted
        return updates

    def meet(self, doing: str) -> None:
        """Wait until all ranks are ``doing`` this instead of a step. No-op before the first step and after the end. Raises
        RanksDiverged if another rank has begun a step, or does something else, and CommschedError if the session failed."""
        self.offer_meeting(doing)
        self.require_meeting()

    def offer_meeting(self, doing: str) -> None:
        """Tell the other ranks what this rank is ``doing`` instead of a step, and do not wait for them. See :meth:`meet`."""
        if self._updater.exchange is not None and not self.ended:
            self._updater.wait_for_flags()
            self._updater.exchange.offer_meeting(doing)

    def require_meeting(self) -> None:
        """Wait until all ranks do what :meth:`offer_meeting` has told. Raises as :meth:`meet`."""
        if self._updater.exchange is not None and not self.ended:
            self._updater.exchange.require_meeting()

    # --- the end ---

    def synchronize(self) -> None:
        """Wait until every update is made, or add that wait to the graph that is being traced."""
        if tf.executing_eagerly():
            self._updater.synchronize()
        elif self.why_all_at_once is None:
            for gate in self._updater.gates:
                gate.settle()

    def _finish(self) -> None:
        """End, because the session closes."""
        self._end(release_groups=False)

    def detach(self) -> None:
        self._end(release_groups=True)
        self._model.train_function = None  # the traced function would average
        self._forget()

    def _end(self, release_groups: bool) -> None:
        self._updater.synchronize()
        if self._updater.exchange is not None:
            self._updater.exchange.require_ended()
        self.ended = True
        for variable in [*self.variables, *self._optimizer.variables]:
            release(variable)
        leave_fit(self._model)
        if self._timeline is not None:
            self._timeline.close()
        if self._updater.exchange is not None:
            self._updater.exchange.close(release_groups)
        self._updater.close()


def _require_unclipped(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuse gradients that this rank has clipped in the graph that is being traced: averages of those are not the clipped
    averages of plain training. An eager gradient does not say where it comes from."""
    if tf.executing_eagerly():
        return
    for gradient, variable in zip(gradients, variables):
        made = getattr(gradient, "values", gradient)
        if isinstance(made, tf.Tensor) and (found := _CLIPPED.search(made.op.name)):
            name = getattr(variable, "path", variable.name)
            raise UnsupportedError(
                f"the gradient of '{name}' was clipped by {found[1]} before it is averaged: "
                "give the optimizer clipnorm, clipvalue or global_clipnorm, or clip what optimizer.average() returns, and "
                "give it to optimizer.apply_averages(); or pass tf.identity(gradient) if each rank is to clip its own"
            )


def _of_the_model(name: str | None) -> str:
    return "no further variable" if name is None else f"variable {name} of the model"


def _refuse_earlier_step(optimizer: Any) -> None:
    if optimizer.is_averaging:
        raise UnsupportedError(
            "a function that uses this optimizer was traced before ScheduledOptimizer was made, so it would train without "
            "averaging: make it after that, with tf.function"
        )
