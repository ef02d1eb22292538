"""Checks for packages that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

from commsched.core.errors import ConfigError


def require_extra(extra: str, *modules: str) -> None:
    """Raise ConfigError with the command that installs ``extra``, unless all of ``modules`` are installed. Imports none of
    them."""
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        raise ConfigError(f'this needs {" and ".join(missing)}: pip install "commsched[{extra}]"')


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # the module is imported, but has no spec
        return True
