"""What if the embedding is also the head, and a pipeline puts the two on different ranks?

Both stages hold a copy that starts with the same bits. After the backwards the two gradients are added, so both copies
see the same gradient, make the same update, and stay equal. The copy counts once in the norm and once on disk.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from triax.nn.decoder import Decoder
from triax.parallel.mesh import patience
from triax.spec.layout import Layout
from triax.spec.schedule import ScheduleTable


class TiedEmbedding:
    """The two copies of a tied embedding under a pipeline; nothing where there is one stage or no tie."""

    def __init__(self, stages: Sequence[Decoder], layout: Layout, table: ScheduleTable) -> None:
        """All ranks call this together: it makes the groups of the ranks that share a copy."""
        self._first: nn.Parameter | None = None
        self._last: nn.Parameter | None = None
        self._group: dist.ProcessGroup | None = None
        if table.num_stages == 1 or not stages[0].model.tie_word_embeddings:
            return
        for stage in stages:
            if stage.embed_tokens is not None:
                weight = stage.embed_tokens.get_parameter("weight")
                if stage.is_first:
                    self._first = weight
                else:
                    self._last = weight
        first_owner, last_owner = table.owners[0], table.owners[-1]
        if first_owner == last_owner:
            return
        for rank in range(layout.world_size):
            here = layout.coordinate(rank)
            if here.pp == first_owner:
                pair = [rank, layout.rank(here._replace(pp=last_owner))]
                group = dist.new_group(pair, timeout=patience())
                if dist.get_rank() in pair:
                    self._group = group

    @property
    def copy(self) -> nn.Parameter | None:
        """The last stage's copy, if it is here."""
        return self._last

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients."""
        held = [parameter for parameter in (self._first, self._last) if parameter is not None]
        gradients = [p.grad._local_tensor for p in held if isinstance(p.grad, DTensor)]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients and self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
