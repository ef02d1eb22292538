"""The part of a ScheduledOptimizer that ``commsched.Elastic`` uses: it leaves a session, undoes updates, joins another."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

import commsched

from ...core.errors import UnsupportedError
from ..common.undo import Undo, require_no_undo, require_only_one
from .initial_state import distinct, options_of, parameters_of, take_options
from .layout import layouts_in
from .norms import NormsOfRound
from .saved import Saved, copied, put_back, saved_for_update
from .update import is_of_torch

if TYPE_CHECKING:
    from ...session.elastic import Keep
    from .optimizer import ScheduledOptimizer


class ElasticPart:
    """See ``ElasticPart`` in ``session/elastic.py``. It uses what ``optimizer`` keeps to itself otherwise."""

    def __init__(self, optimizer: ScheduledOptimizer) -> None:
        self._of = optimizer
        self._is_alone_in: commsched.Session | None = None  # it is known to be the only optimizer
        self._norms = NormsOfRound()  # of the next session's first round

    @property
    def session(self) -> commsched.Session:
        return self._of._session

    def synchronize(self) -> None:
        self._of.synchronize()

    def begin_undo(self, keep: Keep) -> None:
        require_no_undo(self._of._undo)
        kind = type(self._of.optimizer)
        if not is_of_torch(self._of.optimizer):
            raise UnsupportedError(
                f"a {kind.__name__} cannot be elastic: only those of torch.optim are known to keep all their state by parameter"
            )
        self._in_host = keep == "cpu"
        self._undo = self._of._undo = Undo(None if keep == "nothing" else self._saved, self._restore)

    def begin_step(self, step: int) -> int:
        if self._of._has_compiled:
            raise UnsupportedError("code that torch.compile compiles cannot be elastic")
        if self.session.place is not None and self._is_alone_in is not self.session:
            require_only_one(layouts_in(self.session))
            self._is_alone_in = self.session
        return self._undo.begin_step(step)

    def note(self) -> Any:
        model = self._of._model
        with torch.no_grad():
            # A version of a buffer would not say whether it has changed: BatchNorm on the CPU and ``.data`` leave it as it was.
            named = dict(model.named_buffers())
            buffers = {name: (each.numel(), copied(distinct(each), in_host=self._in_host)) for name, each in named.items()}
        pending = {id(slot.parameter) for slot in self._of._pending.values()}
        others = ((name, each) for name, each in model.named_parameters() if id(each) not in pending)
        versions = {name: each._version for name, each in others if not each.requires_grad and not each.is_inference()}
        # Until the next round begins, it changes with what all ranks say of the last one.
        norms = self._norms if self._of._exchange is None else self._of._exchange.measures.next
        return options_of(self._of.optimizer), norms, buffers, versions

    def leave(self) -> int | None:
        of = self._of
        with of._lock:
            steps = self._undo.steps(is_outstanding=bool(of._pending))
            of._pending.clear()
            exchange, of._exchange = of._exchange, None
            if exchange is not None:
                exchange.drop()
            return steps

    def go_back(self, steps: int, noted: Any) -> None:
        options, norms, buffers, versions = noted
        for name, parameter in self._of._model.named_parameters():
            if parameter._version != versions.get(name, parameter._version):
                raise UnsupportedError(
                    f"'{name}', which the optimizer does not update, was changed by the script in the step that was broken "
                    "off, and its values before that are gone: make it a buffer of the model, which goes back with the step"
                )
        named = dict(self._of._model.named_buffers())
        changed = sorted(named.keys() ^ buffers.keys())
        if changed:
            how = "registered" if changed[0] in named else "removed"
            raise UnsupportedError(
                f"buffer '{changed[0]}' was {how} in the step that was broken off, so that step cannot be made again; do that "
                "before the first step"
            )
        self._undo.take_back(steps)
        with torch.no_grad():
            for name, buffer in named.items():
                (size, values), now = buffers[name], distinct(buffer)
                if buffer.numel() != size or now.numel() < values.numel():
                    raise UnsupportedError(
                        f"buffer '{name}' was replaced by one of another size, or by an expanded one, in the step that was "
                        "broken off, so it cannot get its values back"
                    )
                now.copy_(values)
        # A buffer may share a parameter's memory.
        versions |= {name: each._version for name, each in self._of._model.named_parameters() if name in versions}
        self.set_hyper_parameters({"options": options, "norms": asdict(norms)})

    def keep(self) -> bool:
        # Frozen parameters that the optimizer does not know are not copied, since they may be most of the model. The root's are
        # the same, and do not replace equal ones; if they are others, go_back refuses what they have changed.
        others = [each for each in self._of._model.parameters() if each.requires_grad]
        return self._undo.keep({id(each): each for each in [*parameters_of(self._of.optimizer), *others]}.values())

    def move(self, session: commsched.Session) -> None:
        self._of._session = session
        if session.world_size > 1:
            self._of._take_part(session).measures.resume(replace(self._norms))

    def begin_anew(self, steps: int) -> None:
        self._undo.begin_anew(steps)

    def hyper_parameters(self) -> Any:
        exchange = self._of._exchange
        norms = self._norms if exchange is None else exchange.measures.next
        return {"options": options_of(self._of.optimizer), "norms": asdict(norms)}

    def set_hyper_parameters(self, values: Any) -> None:
        take_options(self._of.optimizer, values["options"])
        self._norms = NormsOfRound(**values["norms"])
        if self._of._exchange is not None:
            self._of._exchange.measures.resume(replace(self._norms))

    def load(self, each: Any, state: dict[str, Any]) -> None:
        if isinstance(each, torch.amp.GradScaler):
            with suppress(AssertionError):  # it has no scale yet
                each.update(each.get_scale())  # forgets what it knows of the step that was broken off
        each.load_state_dict(state)

    def _saved(self, parameter: torch.Tensor, memory: Saved | None) -> Saved:
        return saved_for_update(parameter, self._of.optimizer.state.get(parameter), memory, self._in_host)

    def _restore(self, parameter: torch.Tensor, saved: Saved) -> None:
        state = put_back(parameter, saved)
        if state is None:
            self._of.optimizer.state.pop(parameter, None)
        else:
            self._of.optimizer.state[parameter] = state
