"""How many bytes does each rank hold, of what, and when?

``memory`` answers for all candidates at once. ``stages`` says which layers and how many microbatches a rank holds,
``states`` weights, gradients and optimizer, ``activations`` what a layer keeps, ``peak`` adds up and finds the moment.
"""

from triax.plan.memory.peak import ALLOCATED, CATEGORIES, MOMENTS, Memory, memory

__all__ = ["ALLOCATED", "CATEGORIES", "MOMENTS", "Memory", "memory"]
