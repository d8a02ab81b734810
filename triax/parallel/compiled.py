"""How do layers become fused kernels? torch.compile traces each as it is first called; equal ones share their code."""

from collections.abc import Sequence
from typing import Literal

from triax.nn.decoder import Decoder


def compile_layers(stages: Sequence[Decoder], backend: Literal["none", "inductor", "aot_eager"]) -> None:
    """Let ``backend`` make code of every layer of ``stages``, with all that is wrapped around it by then and later.

    Collectives of tensor parallelism and of ``fully_shard`` stay outside what is traced. Weights keep their names.
    """
    if backend == "none":
        return
    for stage in stages:
        for layer in stage.layers.values():
            layer.compile(backend=backend)
