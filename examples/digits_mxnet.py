"""scikit-learn's handwritten digits with MXNet's Gluon, data-parallel.

    python examples/digits_mxnet.py                              # alone
    commsched run -n 2 -- python examples/digits_mxnet.py        # the same training by two ranks, each with half of every batch

The two lines of commsched are marked; without them it is plain Gluon. In float64 the weights of 2, 4 or 8 ranks are those of
one process to 1e-9 of the largest, in float32 to 1e-5.
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from sklearn.datasets import load_digits

import commsched
import commsched.plugins.mxnet as cs  # line 1

BATCH = 64  # of all ranks together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", metavar="FILE.npz", help="where rank 0 writes the trained parameters, by name")
    args = parser.parse_args()

    session = commsched.init()  # for the rank; the plugin would do it by itself
    mx.random.seed(0)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(args.dtype), digits.target.astype(args.dtype)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(128, activation="relu", dtype=args.dtype))
        net.add(gluon.nn.Dense(64, activation="relu", dtype=args.dtype))
        net.add(gluon.nn.Dense(10, dtype=args.dtype))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True, forward_bulk_size=1, backward_bulk_size=1)  # one operation at a time
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    # Was: trainer = gluon.Trainer(net.collect_params(), "sgd", {...})
    trainer = cs.ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})  # line 2
    # All ranks draw the same batches, and each takes its share of every one; the last 360 images are for testing.
    mine = np.random.default_rng(0).integers(0, 1437, (args.steps, BATCH))[:, session.rank :: session.world_size]
    for rows in mine:
        batch, wanted = nd.array(images[rows], dtype=args.dtype), nd.array(labels[rows], dtype=args.dtype)
        with autograd.record():
            loss = loss_of(net(batch), wanted)
        loss.backward()
        trainer.step(len(rows))
    predicted = net(nd.array(images[1437:], dtype=args.dtype)).argmax(axis=1).asnumpy()
    if session.rank == 0:
        right = (predicted == labels[1437:]).mean()
        print(f"{session.world_size} ranks, {args.steps} steps, test accuracy {right:.1%}", flush=True)
        if args.save:
            np.savez(args.save, **{name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()})


if __name__ == "__main__":
    main()
