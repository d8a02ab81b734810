"""How many bytes does each rank hold, of what, and when?

``memory`` answers for all candidates at once. ``stages`` says which layers and how many microbatches a rank holds,
``states`` weights, gradients and optimizer, ``activations`` what a layer keeps, ``peak`` adds up and finds the moment.

``walked_memory`` walks a few candidates of triax's own through their schedules (``own`` and what begins so, ``tape``,
``instants``).
"""

from triax.plan.memory.activations import IMBALANCE
from triax.plan.memory.own import is_walked, walked_memory
from triax.plan.memory.peak import ALLOCATED, CATEGORIES, MOMENTS, Memory, memory

__all__ = ["ALLOCATED", "CATEGORIES", "IMBALANCE", "MOMENTS", "Memory", "is_walked", "memory", "walked_memory"]
