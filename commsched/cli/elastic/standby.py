"""A process that has imported what a script in Python imports, and runs it when the launcher says so: standby.py FD SCRIPT
[ARGUMENT ...]. ``machine.py`` starts it as a process that runs only this file.

At FD comes one line of JSON: the variables of the rank whose place it takes. The script then runs as by ``python SCRIPT``, from
its beginning. Only modules are imported before, and none beside the script, which may look at these variables.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[2]))  # and not the directory of this file

import ast
import builtins
import importlib
import json
import signal
from importlib.machinery import SourceFileLoader


def modules_of(script: str) -> list[str]:
    """The modules that ``script`` imports at its top level, other than those beside it."""
    with open(script, "rb") as file:
        tree = ast.parse(file.read())
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.append(node.module)
    beside = os.path.dirname(os.path.realpath(script))
    tops = {name: os.path.join(beside, name.partition(".")[0]) for name in names}
    return [name for name in names if not os.path.exists(tops[name]) and not os.path.exists(f"{tops[name]}.py")]


def import_all(script: str) -> None:
    """Import them. The script itself says what is wrong with one that fails."""
    try:
        names = modules_of(script)
    except (OSError, SyntaxError, ValueError):
        return
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):
            continue


def main(told: int, script: str, arguments: list[str]) -> None:
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a process that waits, without a word
    import_all(script)
    with open(told, "rb") as pipe:
        line = pipe.readline()
    if not line:
        return  # the launcher has ended
    signal.signal(signal.SIGINT, interrupted)
    os.environ.update(json.loads(line))
    path = os.path.abspath(script)
    sys.argv[:] = [script, *arguments]
    with open(script, "rb") as file:
        code = compile(file.read(), path, "exec")
    namespace = sys.modules["__main__"].__dict__
    fresh: dict[str, object] = {
        "__name__": "__main__",
        "__doc__": None,
        "__package__": None,
        "__loader__": SourceFileLoader("__main__", path),
        "__spec__": None,
        "__annotations__": {},
        "__builtins__": builtins,
        "__file__": path,
        "__cached__": None,
    }
    namespace.clear()
    namespace.update(fresh)
    exec(code, namespace)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
