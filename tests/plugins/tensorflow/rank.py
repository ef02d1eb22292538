"""One rank of the job of test_processes.py, with one thread for operations. Rank 1 ends in the middle, without a word."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import numpy as np
import tensorflow as tf

import commsched
from commsched.plugins.tensorflow import ScheduledOptimizer
from tests.jobs.rank import say
from tests.plugins.tensorflow.test_order import train_holding_the_last_average
from tests.plugins.tensorflow.training import made, mlp, numbers, share, step_of, train


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    session = commsched.init()
    inputs, targets = numbers()
    model = made(mlp, session.rank)
    mine = share(session, inputs, targets)
    optimizer = ScheduledOptimizer(keras.optimizers.Adam(0.01), model)
    weights = train(model, optimizer, *mine, "graph")
    plain = train(made(mlp, 0), keras.optimizers.Adam(0.01), inputs, targets, "graph")
    difference = max(np.abs(a - b).max() for a, b in zip(weights, plain))
    say(1, f"rank {session.rank}: {'equal' if difference < 1e-9 else difference}")
    if session.rank == 0:
        train_holding_the_last_average("graph", 3)  # with ranks that are threads
        say(1, "rank 0: overlaps")
    step = step_of(model, optimizer, compiled=True)
    try:
        while True:
            step(mine[0][0], mine[1][0])
            if session.rank == 1:
                os._exit(3)
    except tf.errors.OpError as error:
        lines = [line for line in str(error).splitlines() if "PeerLost" in line]
        say(1, f"rank {session.rank} saw {lines[0] if lines else error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
