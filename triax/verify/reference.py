"""What does a run come to on one device, by plain PyTorch that shares none of the engine?

Every document goes through the whole network alone, its loss is torch's own, and so are clipping and optimizer: nothing
is cut, packed, sharded or weighted. Of triax it uses the network, the initial weights, and the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows
from triax.nn.loss import IGNORE_INDEX
from triax.parallel.shard import DTYPES
from triax.spec.run import Run
from triax.spec.weights import weights_table
from triax.verify.plain_routing import PlainRouting


class Sequences(Protocol):
    """Where samples come from, by number."""

    def batch(self, samples: range) -> Any:
        """Return the samples: arrays ``tokens`` and ``labels`` (B, S), and ``cu_seqlens``, see ``triax.data.batch``."""


@dataclass(frozen=True)
class Trained:
    """What a run came to: one loss and norm for each step, and whole tensors by name."""

    losses: list[float]
    grad_norms: list[float]
    gradients: Mapping[str, Tensor]
    """Of the first step, before clipping."""
    initial: Mapping[str, Tensor]
    """Weights before the first step."""
    updated: Mapping[str, Tensor]
    """Weights after the first step."""
    weights: Mapping[str, Tensor]
    """Weights after the last step."""
    outputs: Mapping[str, Tensor]
    """What each module gives in the first step, (samples, S, D) by its name; for the first samples alone."""
    routes: Sequence[Mapping[str, Tensor]]
    """Which experts tokens chose in each step, see ``PlainRouting.take_routes``; for the first samples alone."""


def train_plainly(run: Run, sequences: Sequences, steps: int, output_samples: int = 0) -> Trained:
    """Train ``steps`` steps on the CPU and keep what modules give for the first ``output_samples`` samples.

    The learning rate is the peak throughout. Where the compute dtype is narrower than the master's, each forward casts
    the master weights anew, so that gradients are summed in the master's.
    """
    model = Decoder(run.model).to(DTYPES[run.precision.master])
    for weight in weights_table(run.model):
        model.get_parameter(weight.name).data.copy_(initial_rows(weight, run.model, run.train.seed, 0, weight.shape[0]))
    initial = _copies(model.named_parameters())
    optimizer = _plain_optimizer(model, run)
    losses, norms, routes, gradients, updated = [], [], [], {}, {}
    shape = (output_samples, run.data.seq_len, run.model.hidden_size)
    modules = modules_compared(model, inside_layers=True) if output_samples else {}
    routing = PlainRouting(model)
    outputs = {name: torch.zeros(shape, dtype=DTYPES[run.precision.compute]) for name in modules}
    for step in range(steps):
        samples = range(step * run.sequences_per_step, (step + 1) * run.sequences_per_step)
        batches = [sequences.batch(range(sample, sample + 1)) for sample in samples]
        kept = outputs if step == 0 else {}
        losses.append(_accumulate(model, DTYPES[run.precision.compute], batches, kept, routing))
        routes.append(routing.take_routes(output_samples))
        if step == 0:
            gradients = _copies((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        limit = run.optimizer.max_grad_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        routing.move_biases()
        if step == 0:
            updated = _copies(model.named_parameters())
    return Trained(losses, norms, gradients, initial, updated, _copies(model.named_parameters()), outputs, routes)


def _copies(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _accumulate(
    model: Decoder, compute: torch.dtype, batches: Sequence[Any], outputs: Mapping[str, Tensor], routing: PlainRouting
) -> float:
    """Leave the gradient of the mean over all tokens of ``batches``, one sample each, and return that mean.

    Penalties of ``routing`` are in the gradient and not in the mean. What modules give for the first samples is written
    to ``outputs``, as many as there is room for.
    """
    count = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    total = 0.0
    for sample, batch in enumerate(batches):
        bounds = [0, batch.tokens.shape[1]] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        of_sample = torch.zeros((), dtype=torch.float64)
        for start, stop in pairwise(bounds):
            kept = {name: output[sample, start:stop] for name, output in outputs.items() if sample < len(output)}
            with _written(model, kept):
                loss = _document_loss(model, compute, batch, start, stop) / count
            of_sample = of_sample + loss
        (of_sample + routing.penalty_of_sequence() / len(batches)).backward()
        total += of_sample.item()
    return total


def _document_loss(model: Decoder, compute: torch.dtype, batch: Any, start: int, stop: int) -> Tensor:
    """Return the summed cross-entropy of one document, whose positions count from its first token."""
    tokens = torch.from_numpy(batch.tokens[:, start:stop])
    weights = {name: weight.to(compute) for name, weight in model.named_parameters() if weight.requires_grad}
    logits: Tensor = functional_call(model, weights, (tokens, torch.arange(stop - start).unsqueeze(0)))
    labels = torch.from_numpy(batch.labels[:, start:stop]).flatten()
    wide = torch.promote_types(compute, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def modules_compared(model: nn.Module, *, inside_layers: bool) -> dict[str, nn.Module]:
    """Return the modules of a whole network, or of a stage, whose outputs are compared, in the order of the forward."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[0] == "layers" and len(parts) == 2:
            inside = {f"{name}.{part}": module.get_submodule(part) for part in ("self_attn", "mlp")}
            found |= (inside if inside_layers else {}) | {name: module}
        elif name in ("embed_tokens", "norm"):
            found[name] = module
    return found


@contextmanager
def _written(model: Decoder, places: Mapping[str, Tensor]) -> Iterator[None]:
    """Write what modules give for one document into ``places``, (S, D) each, inside the ``with``."""

    def write_to(place: Tensor) -> Any:
        def write(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            place.copy_(output.detach()[0])

        return write

    hooks = [model.get_submodule(name).register_forward_hook(write_to(place)) for name, place in places.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain_optimizer(model: Decoder, run: Run) -> torch.optim.Optimizer:
    spec = run.optimizer
    groups: Sequence[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    rate = run.learning_rate.peak
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, foreach=False)
    return torch.optim.AdamW(groups, lr=rate, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=False)
