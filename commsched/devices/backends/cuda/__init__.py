"""NVIDIA's GPUs, through cupy."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ....core.errors import ConfigError

if TYPE_CHECKING:
    from .device import CudaDevice

#: From this version on, cupy takes the priority of a stream, and streams of other libraries by their protocol.
_OLDEST = 14

_INSTALL = 'pip install "commsched[cuda]" for CUDA 12, or "commsched[cuda13]" for CUDA 13'


def open_device(number: int) -> CudaDevice:
    """Return the GPU of that number, as CUDA counts them in this process.

    Raises:
        ConfigError: cupy is missing or too old, or there is no such GPU.
    """
    name = f"cuda:{number}"
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise ConfigError(f"the device '{name}' needs cupy: {_INSTALL}")
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"the device '{name}' needs cupy, which does not load ({_line(error)}): {_INSTALL}") from error
    if int(cupy.__version__.partition(".")[0]) < _OLDEST:
        raise ConfigError(f"the device '{name}' needs cupy {_OLDEST} or newer, and this is {cupy.__version__}: {_INSTALL}")
    count = _count(cupy, name)
    if number >= count:
        there = f"{count} GPUs, cuda:0 to cuda:{count - 1}" if count > 1 else "one GPU, cuda:0"
        raise ConfigError(f"there is no device '{name}': this process sees {there}")
    from .device import CudaDevice

    return CudaDevice(number)


def model_of(number: int) -> str:
    """The name of the GPU's model. Raises ConfigError as :func:`open_device`."""
    open_device(number)
    import cupy

    try:
        return repr(cupy.cuda.runtime.getDeviceProperties(number)["name"])
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"cuda:{number} has failed: {_line(error)}") from error


def _count(cupy: Any, name: str) -> int:
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"there is no device '{name}': this process sees no GPU ({_line(error)})") from error
    if count == 0:
        raise ConfigError(f"there is no device '{name}': this process sees no GPU")
    return count


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
