"""Copies between the host's memory and a device's for which the host waits, by way of pinned memory."""

from __future__ import annotations

from ...core.device import Device, DeviceStream
from ...core.interfaces import Buffer


def to_host(device: Device, stream: DeviceStream, memory: Buffer) -> memoryview:
    """Copy ``memory`` of the device as ``stream`` finds it when it gets there."""
    copied = device.allocate_host(len(memory))
    stream.copy(copied, memory)
    stream.synchronize()
    return copied


def to_device(device: Device, stream: DeviceStream, target: Buffer, values: memoryview) -> None:
    """Copy ``values``, flat bytes of the host's memory, to ``target`` on the device, in order with the work of ``stream``."""
    pinned = device.allocate_host(len(values))
    pinned[:] = values
    stream.copy(target, pinned)
    stream.synchronize()  # until then ``pinned`` must exist
