"""What does it cost to send tokens to their experts and back?

One array entry a layout. What ranks keep of it is in ``triax.plan.memory.activations``.
"""

import numpy as np

from triax.plan import candidates as bits
from triax.plan.candidates import Candidates, Numbers
from triax.plan.comms import all_to_all_s, split_group
from triax.plan.engine import Engine
from triax.plan.hardware import Machine
from triax.plan.network import Network
from triax.plan.workload import Workload


def expert_s(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, tokens: Numbers
) -> tuple[Numbers, Numbers]:
    """Return seconds in which tokens go to their experts and back, two all-to-alls a layer, and 1 where peers sit in
    several domains."""
    experts = network.experts
    if experts is None:
        return np.zeros(len(c)), np.zeros(len(c))
    peers = split_group(c.ep, c.etp, machine)
    message = dispatched_bytes(network, workload, engine, c, tokens)
    seconds = 2 * all_to_all_s(machine, peers, message) * (network.expert_layers + network.mtp_depth)
    return np.where(c.ep > 1, seconds, 0.0), ((c.ep > 1) & (peers.domains > 1)).astype(np.float64)


def dispatched_bytes(network: Network, workload: Workload, engine: Engine, c: Candidates, tokens: Numbers) -> Numbers:
    """Return bytes of one all-to-all of one layer with experts, those that stay on the rank included."""
    assert network.experts is not None
    experts, width = network.experts, network.experts.latent or network.hidden
    # A token goes to each rank once, however many of its experts are there: balls in ``ep`` boxes.
    copies = c.ep * (1 - (1 - 1 / c.ep) ** experts.per_token)
    number_bytes = 2.0
    if engine.sends_each_choice:
        copies, number_bytes = np.full(len(c), float(experts.per_token)), float(workload.precision.activation_bytes)
    sent: Numbers = tokens / c.tp * c.etp * copies * width * number_bytes
    return sent


def sends_again(engine: Engine, c: Candidates) -> Numbers:
    """Return 1 where tokens go to their experts once more in the backward, since their way is computed again."""
    again = bits.FULL | bits.EXPERTS | (bits.SELECTIVE if engine.sends_each_choice else 0)
    return ((c.recompute & again) > 0).astype(np.float64)
