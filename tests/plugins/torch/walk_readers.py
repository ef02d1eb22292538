"""Calls what PyTorch has for the public with a parameter whose update is outstanding, and prints, as JSON, what it gave.

A process of its own, since some of it changes what is global.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn, overrides

from commsched.plugins.torch.guard import guard, release
from commsched.plugins.torch.marked import Twin, unnoticed

STALE, FRESH = 1.0, 2.0

#: Changes what is global, starts or ends something, reads files, or is no reader by what it is for.
LEFT_OUT = (
    *("set_", "_set_", "use_deterministic", "autocast_", "clear_", "init_num_threads", "import_ir_module", "fork", "wait"),
    *("compile", "manual_seed", "seed", "load", "save", "from_file", "cudnn_", "miopen_", "fbgemm_", "get_file_path"),
    *("__init_subclass__", "__subclasshook__", "__class__", "__new__", "__init__", "__del__", "__setattr__", "__delattr__"),
    *("__torch_function__", "__torch_dispatch__", "_dtensor", "_fix_weakref", "share_memory", "_share", "register_"),
)

MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Parameter": nn.Parameter,
    "torch.nn.functional": nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.sparse": torch.sparse,
    "torch.nested": torch.nested,
    "torch.nn.utils": nn.utils,
    "torch.utils.dlpack": torch.utils.dlpack,
}


class Subject:
    """A parameter of which the values are stale until its update is made."""

    def __init__(self, value: float) -> None:
        self.parameter = nn.Parameter(torch.full((3, 3), value))
        self.twin = Twin(self.parameter, nn.Parameter)
        self.resolved = False

    def guard(self) -> None:
        with unnoticed():
            guard(self.parameter, self.resolve, self.twin)

    def resolve(self) -> None:
        if not self.resolved:
            self.resolved = True
            with torch.inference_mode(False), torch.no_grad():
                self.twin.plain.fill_(FRESH)
            release(self.parameter)


Arguments = Callable[[Any], list[Any]]  # of the parameter


def _x() -> torch.Tensor:
    return torch.full((3, 3), 0.5)


def _row() -> torch.Tensor:
    return torch.full((3,), 0.5)


def _indices() -> torch.Tensor:
    return torch.tensor([0, 2])


#: Called anew for each use, where they can be.
_MORE: list[Any] = [0, 2.0, (3, 3), torch.float64, torch.Tensor, _x, _row, _indices, lambda: [_x(), _x()], None]
_TWO: list[Any] = [(0, 1), (0, 0), (0, _indices), (_x, _x), (0.0, 1.0), (_x, 1.0), (_x, _row), ((3, 3), (3, 1))]
_THREE: list[Any] = [(0, _indices, _x), (0, 0, 1), (_x, 0, 1), (_row, _row, _row)]


def _pattern(*made: Any) -> Arguments:
    """``"p"`` is the parameter, ``"pp"`` a list of it."""

    def arguments(p: Any) -> list[Any]:
        return [p if each == "p" else [p, p] if each == "pp" else each() if inspect.isfunction(each) else each for each in made]

    return arguments


PATTERNS: list[Arguments] = [
    _pattern("p"),
    _pattern("pp"),
    *(_pattern("p", more) for more in _MORE),
    *(_pattern(more, "p") for more in _MORE),
    *(_pattern("pp", more) for more in _MORE),
    _pattern(_x, "pp"),
    _pattern(torch.Tensor, "p", True),
    _pattern("i,j->j", "p"),
    _pattern("p", "p"),
    _pattern(_x, "p", _row),
    *(_pattern("p", *more) for more in (*_TWO, *_THREE)),
    _pattern(_x, _x, "p"),
    _pattern(_row, _row, "p"),
]
ENOUGH = 2  # patterns that a function takes


def snapshot(value: Any) -> Any:
    """What ``value`` says, for comparison; reading it is reading."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided or value.is_quantized:
            return repr(value)
        return value.detach().clone()
    if isinstance(value, torch.UntypedStorage):
        return bytes(value)
    if isinstance(value, torch.TypedStorage):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [snapshot(each) for each in value]
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if type(value).__module__ in ("builtins", "torch", "numpy") and not callable(value) and "object at" not in repr(value):
        return value.tolist() if hasattr(value, "tolist") else repr(value)
    return type(value).__name__


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape == b.shape and a.dtype == b.dtype and a.is_floating_point():  # LAPACK rounds by where memory lies
            return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-4, equal_nan=True)
        return a.shape == b.shape and a.dtype == b.dtype and repr(a.tolist()) == repr(b.tolist())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def call(function: Callable[..., Any], arguments: Arguments, subject: Subject) -> Any:
    torch.manual_seed(0)
    args = arguments(subject.parameter)
    result = function(*args)
    others = [arg for arg in args if isinstance(arg, (torch.Tensor, list)) and arg is not subject.parameter]
    return snapshot([each for each in others if not isinstance(each, list) or each[0] is not subject.parameter]), snapshot(
        result
    )


class Walk:
    def __init__(self) -> None:
        self.read: list[str] = []  # and waited
        self.silent: list[str] = []  # stale values were read
        self.refused: dict[str, str] = {}
        self.untouched: list[str] = []  # no value was read, in any way that was tried
        self.not_called: list[str] = []  # no arguments were found

    def visit(self, name: str, function: Callable[..., Any], patterns: Iterable[Arguments] = PATTERNS) -> None:
        found: list[str] = []
        for arguments in patterns:
            try:
                function(*arguments(nn.Parameter(torch.ones(3, 3))))
            except BaseException:
                continue
            found.append(self._verdict(name, function, arguments))
            if len(found) == ENOUGH:
                break
        for verdict in ("silent", "refused", "read", "untouched"):
            if verdict in found:
                if verdict != "refused":
                    getattr(self, verdict).append(name)
                break
        else:
            self.not_called.append(name)

    def _verdict(self, name: str, function: Callable[..., Any], arguments: Arguments) -> str:
        try:
            subjects = [Subject(FRESH) for _ in range(3)]  # together, so that no two are at one address
            fresh, *again = (call(function, arguments, subject) for subject in subjects)
        except BaseException:
            return "neither"
        if not all(equal(fresh, each) for each in again):
            return "neither"  # for example addresses
        subject = Subject(STALE)
        subject.guard()
        try:
            seen = call(function, arguments, subject)
        except BaseException as error:
            self.refused[name] = f"{type(error).__name__}: {error}"
            return "refused"
        finally:
            resolved = subject.resolved
            subject.resolve()
        if equal(seen, fresh):
            return "read" if resolved else "untouched"
        return "silent"


def _name(function: Any) -> str:
    """Of a getter, that of its property."""
    owner = getattr(function, "__self__", None)
    named = owner if inspect.isdatadescriptor(owner) and not isinstance(owner, type) else function
    named = getattr(named, "fget", named)
    return str(getattr(named, "__qualname__", named))


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All that is public, properties among it, and what PyTorch says that it asks no class about."""
    known: dict[int, Any] = {}
    for module, owner in MODULES.items():
        for name in dir(owner):
            member = getattr(owner, name, None)
            if not callable(member) and isinstance(owner, type):
                member = getattr(inspect.getattr_static(owner, name), "__get__", None)
            if isinstance(owner, type) or not name.startswith("_"):
                known.setdefault(id(member), (f"{module}.{name}", member))
    asked = [each for of in overrides.get_overridable_functions().values() for each in of]
    for each in (*asked, *overrides.get_ignored_functions()):
        known.setdefault(id(each), (f"overrides.{_name(each)}", each))
    for name, member in known.values():
        left_out = name.rpartition(".")[2].startswith(LEFT_OUT) or isinstance(member, (ModuleType, type, torch.dtype))
        if callable(member) and not left_out:
            yield name, member


def _distributed() -> dict[str, tuple[Any, list[Any]]]:
    def zeros() -> list[torch.Tensor]:
        return [torch.zeros(3, 3)]

    def some() -> list[Any]:
        return [None]

    def x() -> torch.Tensor:
        return torch.zeros(3, 3)

    world = dist.group.WORLD
    return {
        "all_reduce": (dist.all_reduce, ["p"]),
        "all_reduce_coalesced": (dist.all_reduce_coalesced, ["pp"]),
        "broadcast": (dist.broadcast, ["p", 0]),
        "reduce": (dist.reduce, ["p", 0]),
        "all_gather": (dist.all_gather, [zeros, "p"]),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, [x, "p"]),
        "all_gather_object": (dist.all_gather_object, [some, "p"]),
        "gather": (dist.gather, ["p", zeros]),
        "scatter": (lambda out, p: dist.scatter(out, [p]), [x, "p"]),
        "reduce_scatter": (lambda out, p: dist.reduce_scatter(out, [p]), [x, "p"]),
        "reduce_scatter_tensor": (dist.reduce_scatter_tensor, [x, "p"]),
        "all_to_all": (lambda out, p: dist.all_to_all(out, [p]), [zeros, "p"]),
        "all_to_all_single": (dist.all_to_all_single, [x, "p"]),
        "broadcast_object_list": (lambda p: dist.broadcast_object_list([p], 0), ["p"]),
        "_broadcast_coalesced": (lambda p: dist._broadcast_coalesced(world, [p], 1 << 20, 0), ["p"]),
        "functional all_reduce": (lambda p: funcol.all_reduce(p, "sum", world), ["p"]),
        "functional broadcast": (lambda p: funcol.broadcast(p, 0, world), ["p"]),
        "functional all_gather_tensor": (lambda p: funcol.all_gather_tensor(p, 0, world), ["p"]),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody has written to is NaN, and not left-overs
    walk = Walk()
    for name, function in functions():
        print(name, file=sys.stderr, flush=True)  # the last is that which ended the process
        walk.visit(name, function)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, (function, made) in _distributed().items():
        print(name, file=sys.stderr, flush=True)
        walk.visit(f"torch.distributed.{name}", function, [_pattern(*made)])
    dist.destroy_process_group()
    json.dump(vars(walk), sys.stdout)


if __name__ == "__main__":
    main()
