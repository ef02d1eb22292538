"""A small network on scikit-learn's handwritten digits, in TensorFlow with Keras, data-parallel.

    commsched run -n 2 -- python examples/digits_tensorflow.py

The two lines of commsched are marked; without them it is plain Keras.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import commsched
from commsched.plugins.tensorflow import ScheduledOptimizer  # line 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters to FILE, an .npz")
    args = parser.parse_args()

    session = commsched.init()  # for the rank; the plugin would do it by itself
    keras.utils.set_random_seed(0)
    keras.config.set_floatx(args.dtype)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(args.dtype), digits.target
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu", name="first"),
            keras.layers.Dense(64, activation="relu", name="second"),
            keras.layers.Dense(10, name="last"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = ScheduledOptimizer(optimizer, model)  # line 2
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # All ranks draw the same batches, and each takes its share of every one; the last 360 images are for testing.
    mine = np.random.default_rng(0).integers(0, 1437, (args.steps, 64))[:, session.rank :: session.world_size]
    model.fit(tf.data.Dataset.from_tensor_slices((images[mine], labels[mine])), shuffle=False, verbose=0)
    right = (model.predict(images[1437:], verbose=0).argmax(1) == labels[1437:]).mean()
    if session.rank == 0:
        print(f"{session.world_size} ranks, {args.steps} steps, test accuracy {right:.1%}", flush=True)
        if args.save:
            np.savez(args.save, **{weight.path: weight.numpy() for weight in model.weights})


if __name__ == "__main__":
    main()
