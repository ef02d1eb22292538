"""Compiled code: each part of a graph waits for the updates of its own parameters, and for no others.

``torch.compile`` makes a graph of a forward and gives it to a backend. The code that the backend makes uses the memory of the
parameters directly, so no guard and no mark is seen. This module therefore comes between the two: it splits the graph into some
parts, as torch does itself for DDP, lets the backend compile each part alone, and puts a *gate* before each part. A gate waits
for the updates of the parameters that the part is the first to use. In backward each part is a node of its own, so its
gradients are submitted while the parts in front of it still run.

The compiler also checks, at each call, that every parameter is what it was when the code was compiled, its class included. A
parameter whose update is outstanding has another class, so here that check is replaced by one that looks at the parameter's own
class. Otherwise the code would be compiled anew in each step. Nothing else is different while compiled code runs: readers that
are not compiled, before, after and between its parts, find guarded parameters.

All names of torch that this needs and that torch does not document are used here. If one of them is missing, or if graphs are
not made to be run here and now, ``step()`` waits for all updates.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakMethod

import torch
from torch._compile import _disable_dynamo

from ...core.errors import error_text
from .guard import Guarded, outside, resolve, unguarded, was_guarded
from .no_gradient import NoGradient
from .parts import beginnings

log = logging.getLogger("commsched")

#: About how many parts the graph of a forward gets. If communication takes as long as computation, a step takes longer by the
#: share of the largest part; otherwise by that of the first or of the last one, which are therefore smaller.
FORWARD_PARTS = 16
#: Smaller parts have too little to wait for, and each takes time to compile. DDP's first bucket has as much.
MIN_FORWARD_PART_BYTES = 1 << 20

#: Called before anything is compiled.
BeforeCompiling = Callable[[], None]
#: Called with the tensors that a graph reads, with the reason why no gate can be put before them (or None), and with whether
#: the compiled code looks at gradients. Returns whether one of the tensors is a parameter of the optimizer that is asked.
GraphMade = Callable[[Sequence[torch.Tensor], str | None, bool], bool]

_watchers: list[tuple[WeakMethod[BeforeCompiling], WeakMethod[GraphMade]]] = []
_coming_between = threading.Lock()


def watch_compiler(before_compiling: BeforeCompiling, graph_made: GraphMade) -> str | None:
    """Call ``before_compiling`` in every thread that is about to compile code, and ``graph_made`` for each graph of it. Return
    why there may be compiled code without gates all the same, as a clause; None if there is none.

    Both are bound methods, which are held weakly. They must not raise.
    """
    _watchers[:] = [watcher for watcher in _watchers if watcher[0]() is not None]
    _watchers.append((WeakMethod(before_compiling), WeakMethod(graph_made)))
    with _coming_between:
        return _come_between()


@cache
def _come_between() -> str | None:
    """Come between the compiler and its backends, for the rest of the process."""
    import torch._dynamo.utils  # already imported by every optimizer of torch, so this takes no time
    from torch._dynamo.output_graph import OutputGraph

    graph_class: Any = OutputGraph
    graph_class.__init__ = _notifying(graph_class.__init__)
    if not hasattr(graph_class, "call_user_compiler"):
        return f"the compiler of PyTorch {torch.__version__} is not known"
    graph_class.call_user_compiler = _gating(graph_class.call_user_compiler)
    if torch._dynamo.utils.counters["frames"]["total"] > 0:
        log.info(
            "what was compiled before the first ScheduledOptimizer was made has no gates: it is compiled anew at its next call"
        )
        torch.compiler.reset()
    return None


def _notifying(make_graph: Callable[..., None]) -> Callable[..., None]:
    """``make_graph`` is called when the compiler begins, before it has looked at any tensor."""

    @wraps(make_graph)
    def notify(*args: Any, **kwargs: Any) -> None:
        _begins()
        make_graph(*args, **kwargs)

    return notify


@_disable_dynamo  # if this function were compiled, it would wait for itself
def _begins() -> None:
    with outside():
        for before_compiling, _ in list(_watchers):
            call = before_compiling()
            if call is not None:
                call()


def _tell(tensors: Sequence[torch.Tensor], why: str | None, reads_gradients: bool) -> bool:
    """Tell each optimizer about a graph; returns whether any of them updates one of ``tensors``."""
    with outside():
        calls = [call for _, graph_made in list(_watchers) if (call := graph_made()) is not None]
        read_by = [call(tensors, why, reads_gradients) for call in calls]  # each is told, whatever the others say
        return any(read_by)


def _gating(call_backend: Callable[..., Any]) -> Callable[..., Any]:
    """``call_backend`` gives a graph to the backend of the user and returns what that makes of it."""

    @wraps(call_backend)
    def gated(graph: Any, module: torch.fx.GraphModule, *args: Any) -> Any:
        backend, seen = graph.compiler_fn, False

        def compile_gated(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            nonlocal seen
            seen = True
            return _compile(graph, backend, module, inputs, options)

        graph.compiler_fn = wraps(backend)(compile_gated)
        try:
            return call_backend(graph, module, *args)
        finally:
            graph.compiler_fn = backend
            if not seen:  # torch has settings by which another backend than the user's compiles a graph
                _tell(_read_by(module), "a graph is compiled by another backend than its own", True)

    return gated


def _compile(graph: Any, backend: Callable[..., Any], module: torch.fx.GraphModule, inputs: Any, options: Any) -> Any:
    read, why = _read_by(module), _why_not(graph, backend, module)
    reads_gradients = any(re.search(r"\.grad\b", guard.name) for guard in graph.guards)
    is_trained = _tell(read, why, reads_gradients)
    if why is not None:
        return backend(module, inputs, **options)
    for guard in graph.guards:
        if guard.create_fn_name() == _TENSOR_MATCH and getattr(guard.create_fn, "func", None) is not _match_own_class:
            guard.create_fn = partial(_match_own_class, guard.create_fn)
    if is_trained and torch.is_grad_enabled() and torch._dynamo.config.optimize_ddp:
        return _in_parts(backend, module, inputs, options)
    return _behind_gate(backend(module, inputs, **options))


def _read_by(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The tensors that the graph of ``module`` reads, in the order of their first use."""
    examples = [node.meta["grapharg"].example for node in module.graph.nodes if "grapharg" in node.meta]
    return [each for each in (*examples, *module.parameters(), *module.buffers()) if isinstance(each, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory in which ``tensor`` lies, be it in a part of it only; 0 if it has none of its own."""
    try:
        with unguarded():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, fake, or made of other tensors
        return 0


def _why_not(graph: Any, backend: Any, module: torch.fx.GraphModule) -> str | None:
    """Why no gate can be put into ``graph``, as a clause; None if it can."""
    if graph.export or not hasattr(backend, "_torchdynamo_orig_backend") or getattr(graph, "package", None) is not None:
        return "a model is exported or stored as compiled code, which reads parameters all at once"
    if next(module.parameters(), None) is not None:
        return "compiled code keeps parameters as constants"
    config = getattr(backend, "get_compiler_config", None)
    is_recorded = getattr(backend, "_compiler_name", "") == "cudagraphs" or (config and config().get("triton.cudagraphs"))
    return "a CUDA graph reads parameters without waiting for their update" if is_recorded else None


# --- parts ---

#: A part of this size is full, for torch's splitter.
_FULL = 2
#: How many values a value counts as that cannot cross the border of a part.
_MANY = 1 << 30


def gate(*tensors: Any) -> None:
    """Wait for the update of each of ``tensors`` that has an outstanding one. Fake tensors never have."""
    for tensor in tensors:
        resolve(tensor)


def _behind_gate(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def gated(*args: Any) -> Any:
        gate(*args)
        return compiled(*args)

    return gated


def _in_parts(backend: Callable[..., Any], module: torch.fx.GraphModule, inputs: Any, options: Any) -> Any:
    try:
        begins = _beginnings(module.graph)
        splitter = _splitter(backend, begins)
        compiled = splitter.compile_fn(module, inputs, **options)
        if len(splitter.buckets) > 1:
            _put_in_order(compiled.graph)
    except torch._dynamo.exc.TorchDynamoException:
        raise  # also those by which the compiler begins again
    except Exception as error:
        log.info("the forward is compiled as one part, since it cannot be split: %s", error_text(error))
        context: Any = torch._guards.TracingContext.try_get()
        if context is not None:
            context.ddp_optimizer_ctx = None
        return _behind_gate(backend(module, inputs, **options))
    if len(splitter.buckets) == 1:
        return _behind_gate(compiled)  # the graph cannot be split there
    passed: set[torch.fx.Node] = set()
    for node in list(compiled.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        needed = [each for each in node.all_input_nodes if each.op == "placeholder" and each not in passed]
        if needed:
            passed.update(needed)
            with compiled.graph.inserting_before(node):
                compiled.graph.call_function(gate, tuple(needed))
    compiled.recompile()
    return compiled


def _put_in_order(graph: torch.fx.Graph) -> None:
    """Let the parts run in the order of the forward. torch orders them by the values that they exchange, and a part that
    changes a value in place need not exchange any."""
    number: dict[torch.fx.Node, int] = {}  # by node: that of the part that it is, or of the last part that it needs
    for node in graph.nodes:
        part = re.fullmatch(r"(compiled_)?submod_(\d+)", str(node.target)) if node.op == "call_module" else None
        needs = max((number[each] for each in node.all_input_nodes), default=-1)
        number[node] = int(part[2]) if part else needs
        if node.op == "call_module" and (part is None or needs >= number[node]):
            raise RuntimeError("the parts that torch's splitter for DDP makes are not known")
    order = sorted(graph.nodes, key=lambda node: (node.op == "output", number[node], node.op != "call_module"))
    for before, node in pairwise(order):
        before.append(node)


def _splitter(backend: Callable[..., Any], begins: set[torch.fx.Node]) -> Any:
    """torch's splitter for DDP, but with parts that begin at the nodes ``begins``.

    It goes through the graph from its end, and begins another part as soon as the one that it is at is full.
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    splitter: Any = DDPOptimizer(_FULL, backend, _FULL)
    if not hasattr(splitter, "add_param_args"):
        raise RuntimeError("torch's splitter for DDP is not known")

    def note(part: Any, node: torch.fx.Node) -> None:
        part.size = _FULL if node in begins or part.size == _FULL else _FULL - 1

    splitter.add_param_args, splitter.add_param = note, lambda *_: None
    return splitter


def _beginnings(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes of ``graph`` at which parts begin, but for the first part."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: index for index, node in enumerate(nodes)}
    nbytes, crossing = [0] * len(nodes), [0] * (len(nodes) + 1)
    for node in graph.nodes:
        users = [place.get(user, len(nodes) - 1) for user in node.users]
        example = node.meta["grapharg"].example if "grapharg" in node.meta else None
        if isinstance(example, torch.Tensor) and example.requires_grad and example.is_leaf and users:
            nbytes[min(users)] += example.numel() * example.element_size()
        if node in place and users:
            values = 1 if _can_cross(node) else _MANY
            crossing[place[node] + 1] += values
            crossing[max(users) + 1] -= values
    for first, last in (*_changing(graph, place), *_in_another_mode(graph, place)):
        crossing[first + 1] += _MANY
        crossing[last + 1] -= _MANY
    part_bytes = max(sum(nbytes) // (FORWARD_PARTS - 1), MIN_FORWARD_PART_BYTES, 1)
    crosses = [each if each < _MANY and _is_noted(node) else None for node, each in zip(nodes, accumulate(crossing))]
    return {nodes[index] for index in beginnings(nbytes, crosses, part_bytes)}


def _is_noted(node: torch.fx.Node) -> bool:
    """Whether torch's splitter for DDP looks for parameters at ``node``, so that a part can begin there."""
    if node.op != "call_method":
        return node.op == "call_function"
    return isinstance(node.args[0], torch.fx.Node) and isinstance(node.args[0].target, str)


def _can_cross(node: torch.fx.Node) -> bool:
    """Whether one part can give the value of ``node`` to another: a tensor, a number, or what torch makes anew in each part."""
    value = node.meta.get("example_value")
    return node.target in _SPLIT_BY_TORCH or not (value is None or isinstance(value, tuple | list))


#: Functions that change a mode of torch which its splitter sets in each part again, and resets behind it.
_SPLIT_BY_TORCH = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
#: Functions without a value that change no mode either.
_ASSERTIONS = re.compile("_*(assert|check|sym_constrain).*")


def _begins_another(node: torch.fx.Node) -> bool:
    """Whether ``node`` may change a mode, and no value of it says where that ends."""
    name = str(getattr(node.target, "__name__", ""))
    if node.op != "call_function" or node.users or _can_cross(node) or _ASSERTIONS.fullmatch(name):
        return False
    if name == "_sdpa_kernel":  # enters and leaves, each time with values that are made just before
        return True
    return not any(each.op == "call_function" and not _can_cross(each) for each in node.all_input_nodes)


def _in_another_mode(graph: torch.fx.Graph, place: dict[torch.fx.Node, int]) -> list[tuple[int, int]]:
    """Where no part may begin, because a mode of torch is not what it is at the beginning of the graph: after the first place
    of each pair, up to the second. A part that ends without gradients would leave the ones behind it without gradients."""
    found = []
    without_gradients: int | None = None
    others: list[int] = []
    for node, index in place.items():
        if node.target is torch._C._set_grad_enabled:
            if not node.args[0]:
                without_gradients = index if without_gradients is None else without_gradients
            elif without_gradients is not None:
                found.append((without_gradients, index))
                without_gradients = None
        elif _begins_another(node):
            others.append(index)
    if without_gradients is not None:
        found.append((without_gradients, len(place) - 1))
    return [*found, (others[0], others[-1])] if others else found


#: Methods and functions that may return the memory of their first argument.
_VIEWS = re.compile(
    "getitem|view|reshape|transpose|t|permute|squeeze|unsqueeze|expand|narrow|select|chunk|split|tensor_split|unbind|flatten|"
    "unflatten|detach|contiguous|expand_as|view_as|movedim|swapaxes|swapdims|diagonal|unfold|to|type_as|real|imag|getattr"
)
#: Methods and functions that change their first argument.
_CHANGES = re.compile("_*(setitem|iadd|isub|imul|imatmul|itruediv|ifloordiv|imod|ipow|iand|ior|ixor|ilshift|irshift)_*|.*[^_]_")


def _changing(graph: torch.fx.Graph, place: dict[torch.fx.Node, int]) -> list[tuple[int, int]]:
    """Where no part may begin, because a value is changed in place: after the first place of each pair, up to the second. The
    parts are ordered by the values that they exchange. So a part that reads a value might run before the one that changes
    it."""
    whose: dict[torch.fx.Node, torch.fx.Node] = {}  # by value: the value whose memory it may share
    until: dict[torch.fx.Node, int] = {}  # by value: the place of its last change
    for node in graph.nodes:
        changed, name = _changed_by(node), str(getattr(node.target, "__name__", node.target))
        source = changed if changed is not None else node.args[0] if _VIEWS.fullmatch(name) and node.args else None
        if isinstance(source, torch.fx.Node):
            whose[node] = whose.get(source, source)
            if changed is not None:
                until[whose[node]] = place[node]
    found = []
    for value, last in until.items():
        if value in place:
            found.append((place[value], last))
        else:  # an argument of the graph, which is not handed on from part to part
            names = [value, *(each for each, its in whose.items() if its is value)]
            used = [place[user] for each in names for user in each.users if user in place]
            found.append((min(used), max(used)))
    return found


def _changed_by(node: torch.fx.Node) -> Any:
    """The value that ``node`` changes in place; None if it changes none."""
    if node.op not in ("call_method", "call_function"):
        return None
    if isinstance(into := node.kwargs.get("out"), torch.fx.Node):
        return into
    name = str(getattr(node.target, "__name__", node.target))
    if not (_CHANGES.fullmatch(name) or node.kwargs.get("inplace")):
        return None
    return node.args[0] if node.args else node.kwargs.get("input")


# --- what the compiler checks at each call ---

_TENSOR_MATCH = "TENSOR_MATCH"


def _match_own_class(create: Callable[..., None], builder: Any, guard: Any) -> None:
    """Make the check of one tensor. ``create`` would make the usual one, which fails while an update is outstanding."""
    try:
        tensor = _first_that_fits(builder.get, (guard,), (guard.name,))
        if was_guarded(tensor) and tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
            text = [f"{guard.name} has the class, type, shape, strides and device of {type(tensor).__name__}"]
            alike, add = _Alike(tensor), builder.get_guard_manager(guard).add_lambda_guard
            _first_that_fits(add, (alike, text, guard.user_stack), (alike, text))
            return
    except (AttributeError, TypeError):
        pass  # a torch where these have other names or arguments: the code is compiled anew until step() waits
    create(builder, guard)


def _first_that_fits(call: Callable[..., Any], *arguments: tuple[Any, ...]) -> Any:
    """Call ``call`` with the first of ``arguments``, which are those of PyTorch 2.13 and of 2.9, that it takes."""
    for each in arguments[:-1]:
        try:
            return call(*each)
        except TypeError:
            pass
    return call(*arguments[-1])


_match_own_class.__name__ = _TENSOR_MATCH  # by this name torch's filters of such checks know it


class _Alike:
    """Checks whether a tensor is like the given one in all that code is compiled for."""

    __slots__ = ("_kind", "_looks")

    def __init__(self, tensor: torch.Tensor) -> None:
        kind: type = type(tensor)
        self._kind = _own(kind)
        self._looks = _looks(tensor)

    def __call__(self, tensor: Any) -> bool:
        kind: type = type(tensor)
        if kind is self._kind:
            return _looks(tensor) == self._looks
        if _own(kind) is not self._kind:
            return False
        with unguarded():
            return _looks(tensor) == self._looks


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.device, tensor.layout


@cache
def _own(kind: type) -> type:
    """The class of a tensor whose class is ``kind`` now, once nothing is outstanding."""
    own: type = kind.__mro__[2] if issubclass(kind, (Guarded, NoGradient)) else kind
    return own
