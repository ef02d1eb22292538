"""A public name of a module means one thing in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import commsched

PACKAGE = Path(commsched.__file__).parent

#: Names of one role that several modules play: engines' plugins, what is found by name, and both ends of a codec.
DELIBERATE = {
    "Agreement",
    "BACKEND",
    "ComparedWeights",
    "Device",
    "ElasticPart",
    "FloatArray",
    "GradientExchange",
    "ITEMSIZE",
    "MAX_MESSAGE_BYTES",
    "Peer",
    "ScheduledOptimizer",
    "Slot",
    "T",
    "decode",
    "digest_of",
    "encode",
    "guard",
    "is_guarded",
    "log",
    "main",
    "make_policy",
    "model_of",
    "numbers_of",
    "open_device",
    "open_transport",
    "release",
    "require_equal_values",
    "require_plain",
    "spec_of",
    "trace_forward",
    "unguarded",
}


def names_of(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def test_no_public_name_means_two_things() -> None:
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in names_of(ast.parse(path.read_text()).body):
            modules[name].append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in modules.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in DELIBERATE} == {}
    assert sorted(DELIBERATE - twice.keys()) == [], "these are not there twice any more"
