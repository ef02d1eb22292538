"""Public conformance suites and fakes for authors of transports, plugins and policies. They need no test framework."""

from .check_plugin import PluginAdapter, check_plugin
from .check_policy import check_policy
from .check_transport import check_transport
from .fakes import Delayed, RecordingTransport, VirtualClock
from .world import run_world

__all__ = [
    "check_transport",
    "check_plugin",
    "check_policy",
    "PluginAdapter",
    "run_world",
    "Delayed",
    "RecordingTransport",
    "VirtualClock",
]
