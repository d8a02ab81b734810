"""Which faults of machines and data does a test inject into a run? Each is a sentence: ``nan_at(step=5)``.

A fault is called with its rank in each rank's process, before training, and wraps what the engine is made of there; the
engine has no hooks for it. Steps are numbered from 0, as the engine does. What happens once does not happen again when
the step is tried again; what is of the data happens whenever the same samples are read.
"""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triax.train import step as steps
from triax.train.optimizer import Optimizer
from triax.train.rollback import Past
from triax.train.step import Stepper

Fault = Callable[[int], None]
"""Called with the rank, in its process."""


def corrupt_batch(step: int, *, once: bool = False, steps_long: int = 1) -> Fault:
    """The samples that a clean run reads in ``step`` (and after) are noise, or are so ``once``."""

    def inject(rank: int) -> None:
        left = [1] if once else [1 << 30]

        def read(reads: Callable[..., Any], self: Stepper, first_sample: int) -> Any:
            batches = reads(self, first_sample)
            size = self._run.sequences_per_step
            if not step * size <= first_sample < (step + steps_long) * size or not left[0]:
                return batches
            left[0] -= 1
            chance = np.random.default_rng((first_sample, self._data_rank))
            vocab = self._run.model.vocab_size

            def noise(like: Any) -> Any:
                return chance.integers(0, vocab, like.shape)

            return [replace(batch, tokens=noise(batch.tokens), labels=noise(batch.labels)) for batch in batches]

        _wrap(Stepper, "read_batches", read)

    return inject


def learning_rate_glitch(step: int, factor: float = 300.0, *, once: bool = True) -> Fault:
    """The update of ``step`` is made with ``factor`` times its learning rate, on all ranks."""

    def inject(rank: int) -> None:
        left = [1] if once else [1 << 30]

        def update(
            updates: Callable[..., Any], self: Stepper, report: Any, rate_factor: float = 1.0, *more: Any
        ) -> Any:
            if report.step == step and left[0]:
                left[0] -= 1
                rate_factor *= factor
            return updates(self, report, rate_factor, *more)

        _wrap(Stepper, "update", update)

    return inject


def flip_bits(rank: int, step: int, weight: str, *, bit: int = 30, element: int = 0, times: int = 1) -> Fault:
    """On ``rank``, one bit of its part of ``weight`` flips before ``step``; ``times``: whenever the step is come to."""
    on_rank = rank

    def inject(rank: int) -> None:
        left = [times if rank == on_rank else 0]

        def accumulate(accumulates: Callable[..., Any], self: Stepper, at: int, *args: Any, **more: Any) -> Any:
            if at == step and left[0]:
                left[0] -= 1
                flip(self._optimizer, weight, bit, element)
            return accumulates(self, at, *args, **more)

        _wrap(Stepper, "accumulate", accumulate)

    return inject


def flip(optimizer: Optimizer, name: str, bit: int, element: int) -> None:
    """Flip one bit of this rank's part of a weight."""
    parameter = dict(optimizer._all)[name].detach()
    local = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
    integers = {4: torch.int32, 8: torch.int64}[local.element_size()]
    local.view(-1).view(integers)[element] ^= 1 << bit


def nan_at(step: int, *, once: bool = True) -> Fault:
    """The loss of ``step`` is not a number."""

    def inject(rank: int) -> None:
        left = [1] if once else [1 << 30]
        at = [-1]

        def accumulate(accumulates: Callable[..., Any], self: Stepper, now: int, *args: Any, **more: Any) -> Any:
            at[0] = now
            return accumulates(self, now, *args, **more)

        sums = steps.sum_step

        def sum_step(loss_sum: Tensor, *args: Any, **more: Any) -> Any:
            if at[0] == step and left[0]:
                left[0] -= 1
                loss_sum = loss_sum * math.nan
            return sums(loss_sum, *args, **more)

        _wrap(Stepper, "accumulate", accumulate)
        steps.sum_step = sum_step

    return inject


def killed_after_rollback(number: int = 1) -> Fault:
    """Every rank dies without a word right after it has gone back for the ``number``-th time."""

    def inject(rank: int) -> None:
        left = [number]

        def return_to(returns: Callable[..., Any], self: Past, *args: Any) -> Any:
            found = returns(self, *args)
            left[0] -= 1
            if not left[0]:
                os._exit(9)
            return found

        _wrap(Past, "return_to", return_to)

    return inject


def reads_late() -> Fault:
    """Not a fault: the host reads a step's numbers when the next is enqueued, as it does with a card."""

    def inject(rank: int) -> None:
        from triax.train.loop import _Loop

        def run(runs: Callable[..., Any], self: Any) -> None:
            self.reads_late = True
            runs(self)

        _wrap(_Loop, "run", run)

    return inject


def _wrap(of: type, name: str, around: Callable[..., Any]) -> None:
    """Let ``around`` be called with the method before the arguments of each call."""
    inner = getattr(of, name)
    setattr(of, name, functools.wraps(inner)(lambda *args, **more: around(inner, *args, **more)))
