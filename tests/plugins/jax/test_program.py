"""How a traced function is laid out flat."""

import jax
import jax.numpy as jnp

from commsched.plugins.jax.program import Program, TracedOperation, has_token


def is_barrier(operation: TracedOperation) -> bool:
    return "optimization_barrier" in str(jax.make_jaxpr(operation.run)(*[jnp.ones(3)] * len(operation.operands)))


def test_what_is_computed_again_is_computed_from_behind_a_barrier() -> None:
    """Else the compiler would keep what ``jax.checkpoint`` is to save the memory of."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))

    program = Program(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3)))
    used = {number for operation in program.operations for number in operation.operands}
    [barrier] = filter(is_barrier, program.operations)
    assert barrier.results
    assert used.issuperset(barrier.results)


def test_an_empty_array_and_a_random_key_have_no_token() -> None:
    assert has_token(jnp.ones(3))
    assert has_token(jnp.float32(1))
    assert not has_token(jnp.ones((0, 3)))
    assert not has_token(jax.random.key(0))
