"""The real Scheduler and the real cut in virtual time, against the exact bound of one iteration.

One network resource, one compute resource, no overhead: then the best any schedule can do is

    T* = max(Tb + Tf, max_h(b_h + .. + b_L  +  c_1 + .. + c_h  +  f_h + .. + f_L))

for forward times f, backward times b and communication times c of the layers, layer 1 at the input side (Jackson's rule for
1 | r, q, pmtn | Cmax). Here the link moves one byte in one unit of time, so that all times are whole numbers.
"""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.policies import make_policy
from commsched.core.scheduler import Scheduler
from commsched.core.task import CommTask
from commsched.testing.fakes import VirtualClock

Layer = tuple[int, int, int]  # forward, backward and communication time

layers = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8)


def sums_to_the_end(values: list[int]) -> list[int]:
    return list(accumulate(reversed(values)))[::-1]


def lower_bound(network: list[Layer]) -> int:
    forward, backward, communication = (list(times) for times in zip(*network))
    f, b, c = sums_to_the_end(forward), sums_to_the_end(backward), list(accumulate(communication))
    return max([b[0] + f[0]] + [b[h] + c[h] + f[h] for h in range(len(network))])


class Iteration:
    """One iteration: from the start of backward to the end of the next forward."""

    def __init__(self, network: list[Layer], policy: str, partition_bytes: int, credit_bytes: int) -> None:
        self.network = network
        manifest = Manifest(tuple(TensorSpec(f"layer{i}", (c,), "uint8") for i, (_, _, c) in enumerate(network)))
        self.plan = cut(manifest, partition_bytes)
        self.tasks = [CommTask(0, 0, partition, None) for partition in self.plan.partitions]
        self.scheduler: Scheduler[CommTask] = Scheduler(make_policy(policy), credit_bytes)
        self.clock = VirtualClock()
        self.link_is_free_at = 0.0
        self.layer_done_at = [0.0] * len(network)

    def seconds(self) -> float:
        written_at = sums_to_the_end([backward for _, backward, _ in self.network])
        for layer in reversed(range(len(self.network))):
            self.clock.call_at(written_at[layer], lambda layer=layer: self.gradient_written(layer))
        self.clock.run()
        now: float = written_at[0]
        for (forward, _, _), done_at in zip(self.network, self.layer_done_at):
            now = max(now, done_at) + forward
        return now

    def gradient_written(self, layer: int) -> None:
        for index in self.plan.by_tensor[layer]:
            self.tasks[index].missing -= 1
            if self.tasks[index].missing == 0:
                self.scheduler.add(self.tasks[index])
        # First let all that is written at this moment become ready, then start the best.
        self.clock.call_at(self.clock.now, self.start)

    def start(self) -> None:
        while (task := self.scheduler.next()) is not None:
            self.link_is_free_at = max(self.link_is_free_at, self.clock.now) + task.nbytes
            self.clock.call_at(self.link_is_free_at, lambda task=task: self.sent(task))

    def sent(self, task: CommTask) -> None:
        self.scheduler.sent(task)
        for layer in task.partition.tensors:
            self.layer_done_at[layer] = self.clock.now
        self.start()


@given(layers)
def test_with_tiny_partitions_the_iteration_takes_exactly_the_bound(network: list[Layer]) -> None:
    assert Iteration(network, "priority", partition_bytes=1, credit_bytes=1).seconds() == lower_bound(network)


@given(layers, st.integers(1, 30))
def test_partitions_cost_at_most_one_for_preemption_and_one_for_merging(network: list[Layer], partition_bytes: int) -> None:
    """A late partition on the link is not interrupted, and the tensors merged into one wait for the last of them."""
    took = Iteration(network, "priority", partition_bytes, credit_bytes=partition_bytes).seconds()
    assert lower_bound(network) <= took <= lower_bound(network) + 2 * partition_bytes


@given(layers, st.integers(1, 30), st.integers(1, 60))
def test_credit_costs_at_most_what_it_commits(network: list[Layer], partition_bytes: int, credit_bytes: int) -> None:
    took = Iteration(network, "priority", partition_bytes, credit_bytes).seconds()
    slack = partition_bytes + max(partition_bytes, credit_bytes)
    assert lower_bound(network) <= took <= lower_bound(network) + slack


@given(layers, st.integers(1, 30), st.integers(1, 60), st.sampled_from(["priority", "fifo"]))
def test_no_policy_beats_the_bound(network: list[Layer], partition_bytes: int, credit_bytes: int, policy: str) -> None:
    assert Iteration(network, policy, partition_bytes, credit_bytes).seconds() >= lower_bound(network)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8))
def test_fifo_gains_nothing_from_overlap_with_forward(network: list[Layer]) -> None:
    """The input layer is sent last, so forward starts when all is sent: the time of backward-overlap alone."""
    forward, backward, communication = (list(times) for times in zip(*network))
    b, c = sums_to_the_end(backward), list(accumulate(communication))
    all_sent_at = max(b[h] + c[h] for h in range(len(network)))
    assert Iteration(network, "fifo", partition_bytes=1, credit_bytes=1).seconds() == all_sent_at + sum(forward)


def test_the_gain_over_fifo_by_hand() -> None:
    """Equal layers, backward twice as long as forward, as much communication as computation: 4/3 in the limit."""
    network = [(10, 20, 30)] * 100
    assert lower_bound(network) == Iteration(network, "priority", 1, 1).seconds() == 3020 + 10
    assert Iteration(network, "fifo", 1, 1).seconds() == 4020
