"""What does it cost to send tokens to their experts and back?

One array entry a layout. What ranks keep of it is in ``triax.plan.memory.activations``.
"""

import numpy as np

from triax.plan import candidates as bits
from triax.plan.candidates import Candidates, Numbers
from triax.plan.comms import all_gather_s, all_to_all_s, forwarded_s, split_group
from triax.plan.engine import Engine
from triax.plan.hardware import Machine
from triax.plan.network import Network
from triax.plan.workload import Workload


def expert_s(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, tokens: Numbers
) -> tuple[Numbers, Numbers]:
    """Return seconds in which tokens go to their experts and back, two ways a layer, and 1 where peers sit in several
    domains. Ranks that share an expert gather what each of them was sent, and sum what goes back."""
    experts = network.experts
    if experts is None:
        return np.zeros(len(c)), np.zeros(len(c))
    peers = split_group(c.ep, c.etp, machine)
    message = dispatched_bytes(network, workload, engine, c, tokens)
    if engine.sends_each_choice:
        way = all_to_all_s(machine, peers, message)
    else:
        once = tokens / c.tp * (experts.latent or network.hidden) * 2.0
        way = forwarded_s(machine, peers, message, once * boxes(peers.domains, experts.per_token))
    sharers = split_group(c.etp, np.ones_like(c.etp), machine)
    chosen = tokens / c.tp * experts.per_token * (experts.latent or network.hidden) * 2.0
    shared = np.where(c.etp > 1, all_gather_s(machine, sharers, chosen * c.etp), 0.0)
    ways = 2 * (network.expert_layers + network.mtp_depth)
    crosses = ((c.ep > 1) & (peers.domains > 1)).astype(np.float64)
    return ways * (np.where(c.ep > 1, way, 0.0) + shared), crosses


def dispatched_bytes(network: Network, workload: Workload, engine: Engine, c: Candidates, tokens: Numbers) -> Numbers:
    """Return bytes of one all-to-all of one layer with experts, those that stay on the rank included."""
    assert network.experts is not None
    experts, width = network.experts, network.experts.latent or network.hidden
    copies, number_bytes = boxes(c.ep.astype(np.float64), experts.per_token), 2.0
    if engine.sends_each_choice:
        copies, number_bytes = np.full(len(c), float(experts.per_token)), float(workload.precision.activation_bytes)
    sent: Numbers = tokens / c.tp * copies * width * number_bytes
    return sent


def boxes(count: Numbers, balls: int) -> Numbers:
    """Return how many of ``count`` places a token goes to whose ``balls`` experts are spread evenly over them."""
    found: Numbers = count * (1 - (1 - 1 / count) ** balls)
    return found


def sends_again(engine: Engine, c: Candidates) -> Numbers:
    """Return 1 where tokens go to their experts once more in the backward, since their way is computed again."""
    again = bits.FULL | bits.EXPERTS | (bits.SELECTIVE if engine.sends_each_choice else 0)
    return ((c.recompute & again) > 0).astype(np.float64)
