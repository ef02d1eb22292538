"""What a session averages and broadcasts may lie on a device."""

from __future__ import annotations

import numpy as np
import pytest

from commsched.core.errors import UnsupportedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.devices import open_device
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing import SimulatedBuffer, SimulatedDevice
from commsched.testing.world import run_world


def filled(device: SimulatedDevice, values: bytes) -> SimulatedBuffer:
    buffer = device.allocate(len(values))
    device.current_stream().launch(lambda memory: np.copyto(memory, np.frombuffer(values, np.uint8)), writes=[buffer])
    device.current_stream().synchronize()
    return buffer


def test_a_broadcast_and_an_average() -> None:
    spec = TensorSpec("x", (3,), "float32")

    def run(rank: int) -> None:
        device = SimulatedDevice(rank, number=rank)
        with sessions[rank] as session:
            sent = filled(device, b"sent by rank 1" if rank == 1 else bytes(14))
            session.broadcast("sent", sent, root=1, device=device)
            assert device.peek(sent) == b"sent by rank 1"
            averaged = filled(device, np.full(3, rank, np.float32).tobytes())
            session.average(spec, averaged, device)
            assert np.frombuffer(device.peek(averaged), np.float32).tolist() == [0.5] * 3

    sessions = local_sessions(2)
    run_world(2, run)


def test_only_one_rank_may_have_a_device() -> None:
    manifest = Manifest((TensorSpec("x", (3,), "float32"),))

    def run(rank: int) -> None:
        device = SimulatedDevice() if rank else open_device("host")
        with sessions[rank] as session:
            buffer = device.allocate(12)
            group = session.register(manifest, {"float32": buffer}, device)
            for step in range(5):
                group.begin_step()
                value = np.full(3, step + 2 * rank, np.float32).tobytes()
                if isinstance(device, SimulatedDevice):
                    kernel = lambda memory, value=value: np.copyto(memory, np.frombuffer(value, np.uint8))  # noqa: E731
                    device.current_stream().launch(kernel, writes=[buffer])
                    group.notify_ready(0, device.current_stream().record())
                else:
                    buffer[:] = value
                    group.notify_ready(0)
                group.proxies[0].wait()
                got = device.peek(buffer) if isinstance(device, SimulatedDevice) else bytes(buffer)
                assert np.frombuffer(got, np.float32).tolist() == [step + 1] * 3

    sessions = local_sessions(2)
    run_world(2, run)


def test_memory_of_another_place_is_refused() -> None:
    [session] = local_sessions(1)
    manifest, device = Manifest((TensorSpec("x", (3,), "float32"),)), SimulatedDevice()

    def register(session: Session) -> None:
        session.register(manifest, {"float32": memoryview(bytearray(12))}, device)

    with session:
        with pytest.raises(ValueError, match="the buffer for float32 is in the host's memory, not on simulated:0"):
            register(session)
        with pytest.raises(ValueError, match="the buffer for float32 has 16 bytes; its tensors have 12"):
            session.register(manifest, {"float32": device.allocate(16)}, device)
        session.transport.device = "cuda:0"
        with pytest.raises(UnsupportedError, match="averages are made on cuda:0, but the memory given is on simulated:0"):
            session.average(manifest.tensors[0], device.allocate(12), device)
