"""Tests of an engine run where it is installed, each in an environment of its own (Makefile)."""

from importlib.util import find_spec

collect_ignore = [engine for engine in ("jax", "mxnet", "tensorflow") if find_spec(engine) is None]
