"""One rank of a training in a real job: rank.py OUT [DIES]. Saves its weights as OUT.<rank>.npz; rank 1 dies in step DIES."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon, nd

import commsched
import commsched.plugins.mxnet as cs

from .training import ROWS, batches, mlp, step, weights_of


def main() -> None:
    out, *dies = sys.argv[1:]
    session = commsched.init()
    net = mlp(session.rank, deferred=True)
    trainer = cs.ScheduledTrainer(net.collect_params(), "nag", {"learning_rate": 0.1, "momentum": 0.9})
    mine = slice(session.rank * ROWS, (session.rank + 1) * ROWS)
    for number, (inputs, labels) in enumerate(batches(session.world_size)):
        if dies == [str(number)] and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(net, trainer, inputs[mine], labels[mine])
        if number % 2:
            evaluate(net, inputs)  # forks, while averages are on their way
    np.savez(f"{out}.{session.rank}", **weights_of(net))


def evaluate(net: Any, inputs: np.ndarray) -> None:
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(nd.array(inputs, dtype="float64")), batch_size=2, num_workers=1)
    for batch in loader:
        net(batch).wait_to_read()


if __name__ == "__main__":
    mx.random.seed(0)
    main()
