"""Does a layout train as one process does? What one of its ranks compares with the reference, while it trains."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triax.data.batch import Batches, batches_of
from triax.data.corpus import Corpus, open_corpus
from triax.parallel.launch import Process
from triax.parallel.place import initialise
from triax.parallel.progress import Progress
from triax.spec.context import positions_of
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.train.assemble import Parts, assemble
from triax.train.worker import Rank, leave, run_as_rank
from triax.verify.finding import Finding, Kind
from triax.verify.reference import Trained, modules_compared
from triax.verify.tolerances import GRADIENT, LOSS, OUTPUT, WEIGHT, relative_difference

_NOISE: Final = {"fp64": 1e-12, "fp32": 1e-6}
"""A gradient that is no larger, relative to the norm of all, is zero but for rounding, and has no relative accuracy:
the bias of keys without positions is one, since softmax does not feel it."""


@dataclass(frozen=True, slots=True)
class ParityOrder:
    """What a rank is told when its process starts."""

    run: str
    """The run as JSON; its steps are those compared."""
    layout: str
    """The layout as JSON."""
    tokens: str
    """Address of the prepared corpus."""
    reference: str
    """File that ``write_reference`` wrote."""
    results: str
    """Folder for ``rank-N.json``."""
    places: str
    """File of ``triax.train.places``."""


def write_reference(trained: Trained, path: Path) -> None:
    """Write what one process came to, for ranks to read."""
    tensors = {
        f"{kind}/{name}": tensor.contiguous()
        for kind in ("gradients", "initial", "updated", "weights", "outputs")
        for name, tensor in getattr(trained, kind).items()
    }
    numbers = {"losses": trained.losses, "grad_norms": trained.grad_norms}
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def sequences_of(run: Run, corpus: Corpus) -> Batches:
    """Return the samples of ``run``, the same for both sides; none are held out."""
    return batches_of(
        corpus, seq_len=run.data.seq_len, attend_across_documents=run.data.attend_across_documents, eval_sequences=0,
        seed=run.train.seed,
    )  # fmt: skip


def work(order: ParityOrder) -> None:
    """Compare as one of several local ranks; leave the process with the exit code where it is not 0."""
    # It says once per gathered tensor that gathering over two axes takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    run, layout = Run.model_validate_json(order.run), Layout.model_validate_json(order.layout)

    def body(rank: Rank) -> None:
        corpus = open_corpus(order.tokens)
        findings = compare(run, layout, rank.process, rank.progress, corpus, Path(order.reference))
        lines = [finding.as_json() for finding in findings]
        (Path(order.results) / f"rank-{rank.process.rank}.json").write_text(json.dumps(lines))

    code = run_as_rank(body, layout, run.train.timeout_s, order.places)
    if code:
        leave(code)


def compare(
    run: Run, layout: Layout, process: Process, progress: Progress, corpus: Corpus, reference: Path
) -> list[Finding]:
    """Train the steps of ``run`` as one rank of ``layout``, by the parts that train any run, and return how everything
    this rank holds compares with ``reference``; all ranks call this together."""
    with safe_open(reference, framework="pt") as file:
        expected = _Expected(file)
        parts = assemble(run, layout, process, sequences_of(run, corpus), progress)
        initialise(parts.stages, run.model, run.train.seed, layout)
        parts.optimizer.copy_tied()
        comparison = _Comparison(run, layout, process, expected)
        progress.enter("the comparison of initial weights")
        comparison.weights("initial", 0, parts)
        for step in range(run.train.steps):
            _take_step(step, parts, comparison, progress)
        return comparison.findings


def _take_step(step: int, parts: Parts, comparison: "_Comparison", progress: Progress) -> None:
    run, is_first = comparison.run, step == 0
    batches = parts.stepper.read_batches(step * run.sequences_per_step)
    with _Outputs(parts, comparison, is_watched=is_first):
        report = parts.stepper.accumulate(step, batches, asks_stop=False)
    if is_first:
        progress.enter_phase("the comparison of gradients")
        comparison.gradients(parts)
    parts.stepper.update(report)
    read = report.read()
    comparison.number("loss", step, read.loss)
    comparison.number("norm", step, read.grad_norm)
    if is_first or step == run.train.steps - 1:
        progress.enter_phase("the comparison of weights")
        comparison.weights("updated" if is_first else "weights", step + 1, parts)


class _Expected:
    """What the reference came to, read from its file tensor by tensor."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = frozenset(file.keys())
        numbers = json.loads(file.metadata()["numbers"])
        self.losses: Sequence[float] = numbers["losses"]
        self.grad_norms: Sequence[float] = numbers["grad_norms"]

    def tensor(self, kind: str, name: str) -> Tensor | None:
        return self._file.get_tensor(f"{kind}/{name}") if f"{kind}/{name}" in self._names else None


class _Comparison:
    """The findings of one rank."""

    def __init__(self, run: Run, layout: Layout, process: Process, expected: _Expected) -> None:
        self.run, self.layout, self.expected = run, layout, expected
        self.place = layout.coordinate(process.rank)
        self.data_rank = layout.data_rank(process.rank)
        self.findings: list[Finding] = []
        self._precision = run.precision.compute

    def number(self, kind: Kind, step: int, actual: float) -> None:
        """Compare the loss or the norm of a step."""
        expected = (self.expected.losses if kind == "loss" else self.expected.grad_norms)[step]
        difference = abs(actual - expected) / max(1.0, abs(expected))
        factor = _factor(torch.tensor(actual), torch.tensor(expected), LOSS[self._precision])
        self._add(kind, "", step + 1, difference, LOSS[self._precision], actual == expected, factor)

    def weights(self, when: str, step: int, parts: Parts) -> None:
        """Compare every weight this rank has a part of; initial weights must have the same bits."""
        is_initial = when == "initial"
        allowed = 0.0 if is_initial else WEIGHT[self._precision, self.run.optimizer.name]
        for name, parameter in _named(parts):
            actual, expected = _whole(parameter), self.expected.tensor(when, name)
            if expected is None:
                self._add("weight", name, step, float("inf"), allowed, False, note="the network has no such weight")
            elif not is_initial and self._is_still(name):
                # Normalised noise may move it by a whole update in any direction.
                moved = float((actual - expected).abs().max()) / (2 * self.run.learning_rate.peak * step)
                self._add("weight", name, step, moved * allowed, allowed, torch.equal(actual, expected))
            else:
                self._tensor("initial" if is_initial else "weight", name, step, actual, expected, allowed)

    def gradients(self, parts: Parts) -> None:
        """Compare the gradient of every weight this rank has a part of."""
        allowed = GRADIENT[self._precision]
        for name, parameter in _named(parts):
            if not parameter.requires_grad:
                continue
            expected = self.expected.tensor("gradients", name)
            if parameter.grad is None or expected is None:
                self._add("gradient", name, 1, float("inf"), allowed, False, note="there is no gradient")
                continue
            actual = _whole(parameter.grad)
            if self._is_still(name):
                noise = 10 * _NOISE[self._precision] * self.expected.grad_norms[0]
                difference = float(actual.abs().max()) / noise * allowed
                self._add("gradient", name, 1, difference, allowed, torch.equal(actual, expected))
            else:
                self._tensor("gradient", name, 1, actual, expected, allowed)

    def _is_still(self, name: str) -> bool:
        gradient = self.expected.tensor("gradients", name)
        return gradient is not None and float(gradient.abs().max()) <= (
            _NOISE[self._precision] * self.expected.grad_norms[0]
        )

    def output(self, name: str, actual: Tensor, microbatch: int) -> None:
        """Compare what a module gave for one microbatch, where the reference kept its samples."""
        whole = self.expected.tensor("outputs", name)
        size, length = actual.shape[:2]
        first = (microbatch * self.layout.data_ranks + self.data_rank) * size
        if whole is None or first + size > len(whole):
            return
        chunks = positions_of(whole.shape[1], self.layout.cp, self.place.cp)
        here = torch.cat([whole[first : first + size, chunk.start : chunk.stop] for chunk in chunks], dim=1)
        start = self.place.tp * length if length < here.shape[1] else 0
        expected = here[:, start : start + length]
        if not float(expected.abs().max()):
            return
        self._tensor("output", name, 1, actual, expected, OUTPUT[self._precision])

    def not_run(self, name: str, times: int) -> None:
        """Say that a module ran ``times`` times and not once for each microbatch."""
        note = f"it ran {times} times for {self.layout.microbatches} microbatches"
        self._add("output", name, 1, float("inf"), OUTPUT[self._precision], False, note=note)

    def _tensor(self, kind: Kind, name: str, step: int, actual: Tensor, expected: Tensor, allowed: float) -> None:
        difference = relative_difference(actual, expected)
        factor = _factor(actual, expected, allowed) if difference > allowed else None
        self._add(kind, name, step, difference, allowed, torch.equal(actual, expected), factor)

    def _add(
        self, kind: Kind, name: str, step: int, difference: float, allowed: float, are_bits_equal: bool,
        factor: float | None = None, note: str = "",
    ) -> None:  # fmt: skip
        factor = factor if difference > allowed else None
        self.findings.append(Finding(kind, name, step, difference, allowed, are_bits_equal, factor, note))


class _Outputs:
    """Compares what modules give inside the ``with``."""

    def __init__(self, parts: Parts, comparison: _Comparison, *, is_watched: bool) -> None:
        self._comparison = comparison
        self._times: dict[str, int] = {}
        # Modules inside a layer run once more in the backward where activations are computed again.
        inside = comparison.layout.recompute == "none"
        self._modules = {
            name: module
            for stage in (parts.stages if is_watched else ())
            for name, module in modules_compared(stage, inside_layers=inside).items()
            if name != "embed_tokens" or stage.is_first
        }
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._times = dict.fromkeys(self._modules, 0)
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._comparison.output(name, output.detach(), self._times[name])
            self._times[name] += 1

        return look

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, times in self._times.items():
            if times != self._comparison.layout.microbatches:
                self._comparison.not_run(name, times)


def _named(parts: Parts) -> Iterator[tuple[str, nn.Parameter]]:
    for stage in parts.stages:
        yield from stage.named_parameters()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from the ranks that share it."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _factor(actual: Tensor, expected: Tensor, allowed: float) -> float | None:
    """Return by what ``expected`` is multiplied to be ``actual``; None where it is no multiple."""
    if actual.shape != expected.shape:
        return None
    one, other = actual.to(torch.float64).flatten(), expected.to(torch.float64).flatten()
    square = float(other @ other)
    factor = float(one @ other) / square if square else 0.0
    # Written so that NaN is no multiple.
    return factor if factor and relative_difference(one, other * factor) <= 10 * allowed else None
