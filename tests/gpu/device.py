"""``python -m tests.gpu.device cuda:0``: check a GPU by ``check_device``, and measure its copies. The last line is JSON: GB/s.
Exit code 2: there is no such device, and the last line says why."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from commsched.core.device import Device, DeviceStream
from commsched.core.errors import ConfigError
from commsched.devices import open_device
from commsched.testing import check_device

COPY_BYTES, COPIES = 1 << 26, 20


def main(name: str) -> int:
    try:
        device = open_device(name)
    except ConfigError as error:
        print(error)
        return 2
    rates = measure(device)
    import cupy

    number = int(name.partition(":")[2])

    def make_array(nbytes: int) -> object:
        with cupy.cuda.Device(number):
            return cupy.zeros(nbytes // 4, cupy.float32)

    def break_device() -> None:
        """End a kernel with an error, after which CUDA does nothing more in this process."""
        with cupy.cuda.Device(number):
            cupy.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")((1,), (1,), ())

    check_device(device, make_array=make_array, break_device=break_device)
    print(json.dumps(rates))
    return 0


def measure(device: Device) -> dict[str, float]:
    """GB/s of large copies: in, out, both at once (the sum), within the device (bytes copied), and of sums of float32 (bytes of
    the result)."""
    memory = [device.allocate(COPY_BYTES) for _ in range(2)]
    hosts = [device.allocate_host(COPY_BYTES) for _ in range(2)]
    one, other = device.stream(), device.stream()

    def both() -> None:
        one.copy(memory[0], hosts[0])
        other.copy(hosts[1], memory[1])

    def rate(work: Callable[[], object], nbytes: int, *streams: DeviceStream) -> float:
        for turn in range(2):  # the first warms up, and compiles
            begin = time.perf_counter()
            for _ in range(COPIES if turn else 2):
                work()
            for stream in streams:
                stream.synchronize()
        return COPIES * nbytes / (time.perf_counter() - begin) / 1e9

    return {
        "host to device": rate(lambda: one.copy(memory[0], hosts[0]), COPY_BYTES, one),
        "device to host": rate(lambda: one.copy(hosts[1], memory[1]), COPY_BYTES, one),
        "both at once": rate(both, 2 * COPY_BYTES, one, other),
        "within the device": rate(lambda: one.copy(*memory), COPY_BYTES, one),
        "sum of float32": rate(lambda: one.add(*memory, "float32"), COPY_BYTES, one),
    }


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # objects of a GPU that has failed cannot be freed
