"""A transport around another one passes on everything that it does not change itself."""

from __future__ import annotations

from typing import Any, get_type_hints

from commsched.core.interfaces import ForwardingTransport, Transport


class Inner(Transport):
    """Every attribute differs from its default; every call is recorded."""

    rank, world_size, channels, leaders = 3, 5, 7, (0, 0, 2)
    verbs = frozenset({"another"})
    ordered = one_per_host = True
    servers = 3
    device = "elsewhere"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *arguments: self.calls.append((name, *arguments))
        return super().__getattribute__(name)


METHODS = {name for name, member in vars(Transport).items() if callable(member) and not name.startswith("_")}


def test_every_attribute_is_that_of_the_inner_transport() -> None:
    inner = Inner()
    for name in get_type_hints(Transport):
        assert getattr(inner, name) != getattr(Transport, name, None), f"{name} is not covered by this test"
        assert getattr(ForwardingTransport(inner), name) == getattr(inner, name), name


def test_every_call_is_passed_on_with_its_arguments() -> None:
    inner = Inner()
    outer = ForwardingTransport(inner)
    outer.add_group(1, "manifest")  # type: ignore[arg-type]
    outer.mirror(1, "manifest", "device")  # type: ignore[arg-type]
    outer.norm_rows("manifest")  # type: ignore[arg-type]
    outer.collect("task", "collected")  # type: ignore[arg-type]
    outer.start("task", "completion")  # type: ignore[arg-type]
    outer.release(1)
    outer.leave(2)
    outer.close(False)
    assert inner.calls == [
        ("add_group", 1, "manifest"),
        ("mirror", 1, "manifest", "device"),
        ("norm_rows", "manifest"),
        ("collect", "task", "collected"),
        ("start", "task", "completion"),
        ("release", 1),
        ("leave", 2),
        ("close", False),
    ]
    assert {call[0] for call in inner.calls} == METHODS
