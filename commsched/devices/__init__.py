"""Devices: the memory that holds gradients, and the queues of work on it. ``core.device`` has their interface.

backends/    one module for each kind of device, found by its name
arithmetic   sums and conversions of elements in the host's memory
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..core.device import Device
from ..core.errors import ConfigError
from . import backends


def device_kinds() -> list[str]:
    """The kinds of device, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(backends.__path__))


def model_of(name: str) -> str:
    """The model of the device ``name``: devices of the same one compute alike. Empty for the host, whose processor counts, and
    for a device that is not to be had."""
    kind, _, number = name.partition(":")
    if kind not in device_kinds() or not (number or "0").isdecimal():
        return ""
    try:
        model: str = import_module(f"{backends.__name__}.{kind}").model_of(int(number or 0))
    except ConfigError:  # whoever needs the device opens it, and says so
        return ""
    return model


def open_device(name: str) -> Device:
    """Open the device ``name``: a kind, and the number of the device where there are several, as in ``cuda:1``. Without a
    number it is 0.

    Raises:
        ConfigError: there is no such kind, the package that it needs is missing, or there is no such device on this machine.
    """
    kind, _, number = name.partition(":")
    if kind not in device_kinds():
        raise ConfigError(f"there is no device '{name}'; the kinds of device are: {', '.join(device_kinds())}")
    if number and not (number.isascii() and number.isdecimal()):
        raise ConfigError(f"there is no device '{name}'; write {kind}:0, with the number of the device")
    device: Device = import_module(f"{backends.__name__}.{kind}").open_device(int(number or 0))
    return device
