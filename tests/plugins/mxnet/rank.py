"""One rank of a training in a real job: rank.py OUT [DIES]. Saves its weights as OUT.<rank>.npz, and as OUT.store.<rank>.npz
those of a training over the kvstore. With DIES there is but this one, and rank 1 dies in that step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import commsched

session = commsched.init()  # before MXNet is imported, whose engine must end after it all the same

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import gluon, nd  # noqa: E402
from mxnet.contrib import amp  # noqa: E402, F401  # changes in which order Python frees what MXNet uses at exit

import commsched.plugins.mxnet as cs  # noqa: E402

from .training import NAG, batches, mlp, share, step, weights_of  # noqa: E402


def main() -> None:
    out, *dies = sys.argv[1:]
    if not dies:
        net = mlp(session.rank, deferred=True, hybridize={})
        cs.trace_forward(net)
        train(net, cs.ScheduledTrainer(net.collect_params(), *NAG))
        np.savez(f"{out}.{session.rank}", **weights_of(net))
    net = mlp(deferred=True)
    train(net, trainer_over_store(net), dies)
    np.savez(f"{out}.store.{session.rank}", **weights_of(net))


def trainer_over_store(net: Any) -> gluon.Trainer:
    """Gradients are added up, and not averaged."""
    optimizer = mx.optimizer.create(NAG[0], **NAG[1], rescale_grad=0.5)
    return gluon.Trainer(net.collect_params(), optimizer, kvstore="dist_sync_commsched")


def train(net: Any, trainer: gluon.Trainer, dies: list[str] | tuple[()] = ()) -> None:
    for number, (inputs, labels) in enumerate(batches(session.world_size)):
        if list(dies) == [str(number)] and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        if number == 3:
            evaluate(net, inputs)  # forks, while averages are on their way


def evaluate(net: Any, inputs: np.ndarray) -> None:
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(nd.array(inputs, dtype="float64")), batch_size=2, num_workers=1)
    for batch in loader:
        net(batch.as_in_context(mx.cpu())).wait_to_read()  # a loader gives cpu_shared


if __name__ == "__main__":
    mx.random.seed(0)
    main()
