"""What does a rank hold, send and compute in one step, whether its tensors are real or stand in for such?

The same onlooker for both: below everything that computes, where torch dispatches one operation after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # it defines what copies into and out of collectives
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from triax.data.batch import Batch
from triax.nn.decoder import Decoder
from triax.nn.ranges import BODIES
from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.schedule import Action
from triax.train.assemble import Parts, assemble
from triax.train.step import AFTER_SCHEDULE
from triax.verify.balanced import force_balance
from triax.verify.ghosts import Ghosts
from triax.verify.ledger import Ledger, Moment, Phase
from triax.verify.operands import has_memory, tensors_in
from triax.verify.operations import flops
from triax.verify.traffic import Collective, Traffic

_COPY_IN: Final = torch.ops.fsdp.chunk_cat.default
"""Gradients, one below the other, into the buffer that is reduced."""
_GATHER_IN: Final = torch.ops.fsdp.all_gather_copy_in.default
"""Shards into the buffer that is gathered."""
_FILL: Final = torch.ops.aten.copy_.default
_COPY_OUT: Final = torch.ops.fsdp.split_with_sizes_copy.default
"""What was gathered into the copies that compute."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of one rank."""

    moments: tuple[Moment, ...]
    """The fullest moment of each phase, in order."""
    collectives: tuple[Collective, ...]
    """In the order in which this rank entered them."""
    flops: dict[str, int]
    """Operations by phase."""
    actions: tuple[Action, ...]
    """Forwards and backwards in the order in which they ran."""

    @property
    def peak(self) -> Moment:
        """The moment at which the most was held."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def total_flops(self) -> int:
        """Operations of the step on this rank."""
        return sum(self.flops.values())


class Onlooker(Progress):
    """Is told by the engine what the rank is doing, and keeps the books."""

    def __init__(self, layout: Layout, rank: int, cards_per_server: int, *, holds_sent: bool) -> None:
        """``holds_sent``: hold what stages send each other until the schedule has ended. A real send holds it, and
        torch's runtime waits for sends only then; one that stands in for it lets go at once."""
        super().__init__()
        self.ledger = Ledger()
        self.traffic = Traffic(layout, rank, cards_per_server)
        self.now = Phase("before the step", is_action=False)
        self.collectives: list[Collective] = []
        self.flops: dict[str, int] = {}
        self.actions: list[Action] = []
        self._is_action = False
        self._stages: tuple[Decoder, ...] = ()
        self._holds_sent = holds_sent
        self._sent: list[Tensor] = []

    def watch(self, parts: Parts) -> None:
        """Write down what ``parts`` hold before the step, and forget what was before."""
        self.actions.clear()
        self._stages = tuple(parts.stages)
        for stage in self._stages:
            for weight in stage.parameters():
                self.ledger.add(weight.detach(), "weights")
            for buffer in stage.buffers():
                self.ledger.add(buffer, "weights")
        for state in parts.optimizer.state_tensors().values():
            self.ledger.add(state, "optimizer")

    def enter_phase(self, phase: str) -> None:
        """See ``Progress.enter_phase``."""
        super().enter_phase(phase)
        if phase == AFTER_SCHEDULE:
            self._sent.clear()
        self._mark_held()
        self.now = Phase(phase, self._is_action)
        self.ledger.enter(self.now)

    def begin(self, action: Action) -> None:
        """See ``Progress.begin``."""
        self.actions.append(action)
        self._is_action = True
        super().begin(action)
        self._is_action = False

    def pass_on(self, collective: Collective, tensors: Sequence[Tensor]) -> None:
        """Write down a collective, which reads and writes ``tensors``."""
        self.collectives.append(collective)
        for tensor in tensors:
            self.ledger.add_passed(tensor)
        if self._holds_sent and collective.kind == "send" and collective.axis == "pp":
            self._sent += tensors

    def _mark_held(self) -> None:
        """Say what the storages are for that ``fully_shard`` holds at the end of a phase."""
        for stage in self._stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    for group in module._get_fsdp_state()._fsdp_param_groups:
                        self._mark_group(group)

    def _mark_group(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            for output in parameter.all_gather_outputs:
                self.ledger.add_resized(output, "compute_copies")
            gathered = getattr(parameter, "_unsharded_param", None)
            of_gathered = None if gathered is None else gathered.grad
            for gradient in (parameter.sharded_param.grad, parameter.unsharded_accumulated_grad, of_gathered):
                if gradient is not None:
                    self.ledger.add(gradient, "gradients")
        if group._partial_reduce_output is not None:
            self.ledger.add(group._partial_reduce_output, "gradients")


class _Dispatch(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self, onlooker: Onlooker, ghosts: Ghosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._onlooker, self._ghosts = onlooker, ghosts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        if self._ghosts.are_about:
            return func(*args, **kwargs)
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        onlooker, ledger = self._onlooker, self._onlooker.ledger
        if func.namespace == "c10d":
            onlooker.pass_on(*onlooker.traffic.collective(func, args, kwargs, onlooker.now.name))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is _FILL:
            ledger.add_filled(args[0])
        given = tensors_in((*args, *kwargs.values()))
        for tensor in tensors_in((result,)):
            if has_memory(tensor):
                ledger.add_made(tensor, given)
        if func.namespace == "fsdp":
            _mark(ledger, func, args, kwargs, result)
        count = flops(func, args, kwargs, result)
        if count:
            phase = onlooker.now.name
            onlooker.flops[phase] = onlooker.flops.get(phase, 0) + count
        return result


def _mark(ledger: Ledger, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Say what the storages are for that pass between ``fully_shard`` and its collectives."""
    if func is _COPY_IN:
        for gradient in args[0]:
            ledger.add(gradient, "gradients")
        ledger.add(kwargs["out"] if "out" in kwargs else args[3], "communication")
    elif func is _GATHER_IN:
        ledger.add(result[1], "communication")
        for shard in args[0]:
            ledger.add_passed(shard)
    elif func is _COPY_OUT:
        for copy in kwargs["out"]:
            ledger.add_resized(copy, "compute_copies")


@contextmanager
def looking_on(onlooker: Onlooker, stages: Sequence[Decoder]) -> Iterator[None]:
    """Let ``onlooker`` see every operation inside the ``with``, and which module of ``stages`` it is in."""
    ghosts = Ghosts()
    with ExitStack() as held:
        for stage in stages:
            for name, module in stage.named_modules():
                if name.count(".") <= 2 and not isinstance(module, nn.ModuleDict):
                    for hook in _hooks(module, name, onlooker.ledger):
                        held.callback(hook.remove)
        held.enter_context(ghosts.watched())
        held.enter_context(_Dispatch(onlooker, ghosts))
        yield


def _hooks(module: nn.Module, name: str, ledger: Ledger) -> list[Any]:
    """Tell ``ledger`` when ``module`` begins its forward, and when a backward has come to it."""

    def forward(_module: nn.Module, _inputs: Any) -> None:
        ledger.enter_module(name)

    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(backward)

    def backward(_gradient: Tensor) -> None:
        ledger.enter_module(name)

    return [module.register_forward_pre_hook(forward), module.register_forward_hook(after)]


def observe(
    run: Run, layout: Layout, process: Process, batches: "Sequence[Batch]", cards_per_server: int,
    prepare: Callable[[Parts], None] | None = None,
) -> Observation:  # fmt: skip
    """Return what this rank holds, sends and computes in a step on ``batches``; all ranks call this together.

    The parts are those that train any run; experts are routed to equally. Where tensors are real, ``prepare`` gets
    them before the step, to fill the weights; without it, they stand in for such.
    """
    onlooker = Onlooker(layout, process.rank, cards_per_server, holds_sent=prepare is None)
    nowhere = cast(Any, None)  # the batches are given
    parts = assemble(run, layout, process, nowhere, onlooker)
    force_balance(parts.stages)
    if prepare is not None:
        prepare(parts)
    onlooker.watch(parts)
    with looking_on(onlooker, parts.stages):
        report = parts.stepper.accumulate(0, list(batches), asks_stop=False)
        parts.stepper.update(report)
    return Observation(
        tuple(onlooker.ledger.moments()), tuple(onlooker.collectives), onlooker.flops, tuple(onlooker.actions)
    )
