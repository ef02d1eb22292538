"""JAX plugin: data-parallel training in which the next step's forward starts layer by layer, while averages are outstanding.

import commsched.plugins.jax as cs
"""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs JAX and Optax: pip install "commsched[jax]"', name=error.name) from error

from .average_gradients import average_gradients
from .host_call import jit
from .leaves import broadcast
from .state import TrainState, create, synchronize
from .value_and_update import value_and_update

__all__ = ["TrainState", "average_gradients", "broadcast", "create", "jit", "synchronize", "value_and_update"]
