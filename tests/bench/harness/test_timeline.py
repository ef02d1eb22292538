from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.harness import timeline
from bench.harness.timeline import Recorder


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        self.seconds += 1.0
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timeline, "monotonic", clock)
    return clock


def task(group, index, start, stop, ready_at, started_at, done_at):
    partition = SimpleNamespace(index=index, start=start, stop=stop, nbytes=stop - start)
    return SimpleNamespace(group=group, partition=partition, ready_at=ready_at, started_at=started_at, done_at=done_at)


def model():
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))


def record(during=lambda recorder: None):
    layers = model()
    recorder = Recorder(layers)
    loss = layers(torch.ones(2)).sum()  # not yet recorded
    recorder.backward_begins()  # 101
    loss.backward()  # two gradients of layer 2 at 102 and 103, one of layer 0 at 104
    with recorder.forward_of_next_step(), torch.no_grad():
        layers(torch.ones(2))  # 105, 106; ends at 107
    during(recorder)
    recorder.stop()
    layers(torch.ones(2)).sum().backward()
    recorder.on_message("late", 0.0, 1.0)
    recorder.on_task(task(1, 0, 0, 4, 0, 0, 0))
    return recorder.timeline(["0", "2"], [16, 24])


def of(entries, track):
    return [(entry["name"], entry["start"], entry["stop"]) for entry in entries if entry["track"] == track]


def test_layers_stand_from_one_to_the_next(clock):
    entries = record()
    assert of(entries, "backward") == [("2", 0.0, 2.0), ("0", 2.0, 3.0)]
    assert of(entries, "forward") == [("0", 4.0, 5.0), ("2", 5.0, 6.0)]
    assert len(entries) == 4
    assert all(entry["priority"] is None and "ready" not in entry for entry in entries)


def test_a_layer_computes_when_it_has_waited(clock):
    def during(recorder):
        recorder.on_span("wait", "0.weight", 105.2, 105.8)
        recorder.on_span("wait", "nothing to wait for", 105.9, 105.9)
        recorder.on_span("update", "0.weight", 105.8, 105.9)

    entries = record(during)
    assert of(entries, "wait") == [("0.weight", pytest.approx(4.2), pytest.approx(4.8))]
    assert of(entries, "forward")[0] == ("0", pytest.approx(4.8), 5.0)


def test_partitions_are_named_by_their_first_layer_and_flags_are_no_gradients(clock):
    def during(recorder):
        recorder.on_task(task(7, 1, 12, 20, 103.0, 104.0, 106.0))
        recorder.on_task(task(7, 2, 20, 40, 102.0, 103.0, 105.0))
        recorder.on_task(task(8, 0, 0, 8, 104.0, 104.5, 104.6))

    network = [entry for entry in record(during) if entry["track"] == "network"]
    assert [(entry["name"], entry["priority"], entry["ready"], entry["start"], entry["stop"]) for entry in network] == [
        ("2 [2]", 2, 1.0, 2.0, 4.0),
        ("0 [1]", 1, 2.0, 3.0, 5.0),
        ("flags", None, 3.0, 3.5, pytest.approx(3.6)),
    ]


def test_messages_without_a_priority(clock):
    entries = record(lambda recorder: recorder.on_message("bucket 0", 103.0, 104.0))
    assert [entry for entry in entries if entry["track"] == "network"] == [
        {"track": "network", "name": "bucket 0", "priority": None, "ready": 2.0, "start": 2.0, "stop": 3.0}
    ]
