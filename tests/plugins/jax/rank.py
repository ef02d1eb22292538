"""A rank of a job of processes: trains, and at step 3 the last rank is gone."""

import os

import optax

import commsched
import commsched.plugins.jax as cs

from .training import loss, make_batch, make_params


def main() -> None:
    session = commsched.init()
    state = cs.create(make_params(session.rank), optax.adam(0.01), session=session)
    step = cs.jit(cs.value_and_update(loss))
    for index in range(100):
        if index == 3 and session.rank == session.world_size - 1:
            os._exit(7)
        try:
            _, state = step(state, *make_batch(session.rank, index))
        except commsched.CommschedError as error:
            told = f"{type(error).__name__} from {type(error.__cause__).__name__}: {error}"
            print(f"rank {session.rank} was told at step {index}: {told}", flush=True)
            raise


if __name__ == "__main__":
    main()
