"""Public conformance suites for authors of transports, plugins, policies and devices, and a device without hardware. They need
no test framework."""

from ..core.interfaces import OnFailure
from .check_device import CheckedDevice, check_device
from .check_plugin import Delayed, PluginAdapter, check_plugin
from .check_policy import check_policy
from .check_transport import check_job, check_transport
from .checked_world import Meeting, OpenSession, OpenWorld, world_of
from .simulated_device import SimulatedBuffer, SimulatedDevice, SimulatedEvent, SimulatedFailure, SimulatedStream
from .world import run_world

__all__ = [
    "check_device",
    "CheckedDevice",
    "check_transport",
    "check_job",
    "check_plugin",
    "check_policy",
    "PluginAdapter",
    "OnFailure",
    "OpenWorld",
    "OpenSession",
    "Meeting",
    "world_of",
    "run_world",
    "Delayed",
    "SimulatedDevice",
    "SimulatedBuffer",
    "SimulatedStream",
    "SimulatedEvent",
    "SimulatedFailure",
]
