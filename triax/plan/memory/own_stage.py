"""What does one pipeline stage of triax hold while it runs a forward or a backward?

States, the copies that ``fully_shard`` gathers, the buffers of its collectives (``triax.parallel.shard``), the loss,
and layers one after the other: the most is at the ends of the walk, or where one kind of layer follows another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from triax.plan.memory.instants import Instant
from triax.plan.memory.own_layer import LayerBytes

Bytes = dict[str, float]
"""By category, as ``triax.plan.memory.peak`` has them."""
Moment = tuple[str, Bytes]
"""The kind of moment, and what is held then."""

CHUNK_LOGITS: Final = 1 << 27
"""Logits that the loss makes at once on a card (``triax.nn.loss``)."""


@dataclass(frozen=True)
class Unit:
    """Numbers of weights that are gathered and reduced at once."""

    dense: float
    expert: float
    largest: float
    """Of its largest matrix."""


@dataclass(frozen=True)
class Ranks:
    """How weights are shared, and in how many bytes a number."""

    zero: int
    is_pipeline: bool
    is_replicated: bool
    dense: float
    """Ranks that share a weight."""
    expert: float
    """Ranks that share the weight of an expert."""
    compute: float
    master: float
    reduce: float
    moments: float

    @property
    def wide(self) -> float:
        """Bytes of a number where at least fp32 is asked for."""
        return max(self.compute, 4.0)

    @property
    def adds(self) -> bool:
        """Gradients of weights are added to what is there as they come, but for the first ones."""
        return self.zero <= 1 and self.reduce == self.compute

    @property
    def drops_each(self) -> bool:
        """Every backward leaves nothing gathered."""
        return self.zero == 3 or (self.zero == 0 and not self.is_pipeline)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a microbatch, but for its vocabulary and logits, which are numbers."""

    stream: float
    """A hidden state of this rank's part of the sequence."""
    gathered: float
    """The same, gathered over tp."""
    rotation: float
    """Sines and cosines."""
    vocabulary: float
    """Numbers of this rank's part of the head."""
    logits: float
    norm_kept: float
    """What the last norm keeps until the backward."""
    norm_work: float
    """What a norm makes in its backward."""
    saves_input: bool
    """A layer keeps what it is given."""


@dataclass(frozen=True)
class Plan:
    """What a stage is made of, its layers from first to last."""

    units: Sequence[Unit]
    layers: Sequence[LayerBytes]
    adding: Sequence[LayerBytes]
    """The layers where gradients are added to what is there at once."""
    root: Unit
    """What stands outside of the layers."""
    has_embedding: bool
    has_head: bool


class Stage:
    """One stage of a rank."""

    def __init__(self, plan: Plan, ranks: Ranks, sizes: Sizes) -> None:
        self.plan, self.ranks, self.sizes = plan, ranks, sizes
        self._top = len(plan.layers) - 1
        # Sums over the layers below each place.
        self._kept = [0.0, *accumulate(layer.kept for layer in plan.layers)]
        self._copied = [0.0, *accumulate(self._copy(unit) for unit in plan.units)]
        self._summed = [0.0, *accumulate(self._gradient(unit) for unit in plan.units)]
        self._sharded = [0.0, *accumulate(self.shard(unit) for unit in plan.units)]
        last = self._top
        self._last_of_each = {
            place for place, layer in enumerate(plan.layers) if place == last or plan.layers[place + 1] != layer
        }
        self.kept = self._kept[-1] + sizes.rotation
        """Of one microbatch until its backward."""
        if sizes.saves_input and not plan.has_embedding:
            self.kept -= sizes.stream  # it stands in the buffer that received it
        self.split = sum(layer.split for layer in plan.layers) + sizes.rotation
        """Of one microbatch between the two parts of its backward."""
        self.copies = self._copied[-1] + self._copy(plan.root)
        """All weights as they compute."""
        self.root_copies = self._copy(plan.root)
        self.gradients = self._summed[-1] + self._gradient(plan.root)
        """All gradients as they are kept between microbatches."""
        self.shards = self._sharded[-1] + self.shard(plan.root)
        """All gradients when they are reduced."""
        self.unfreed = 0.0
        """The buffer of the last reduction in the second part of a split backward, which the next one frees."""
        if ranks.zero >= 2:
            self.unfreed = ranks.reduce * max(plan.units[-1].dense, plan.units[-1].expert)
        self.after_loss = 0.0
        """Gradients of the hidden states and of the head, which wait for the backward, and what the last norm keeps."""
        if plan.has_head:
            self.after_loss = sizes.gathered + ranks.wide * sizes.vocabulary + sizes.norm_kept

    def _copy(self, unit: Unit) -> float:
        return self.ranks.compute * (unit.dense + unit.expert)

    def _passing(self, unit: Unit) -> float:
        """The buffer through which ``unit`` is gathered; one rank alone needs none."""
        dense = unit.dense if self.ranks.dense > 1 else 0.0
        return self.ranks.compute * (dense + (unit.expert if self.ranks.expert > 1 else 0.0))

    def _gradient(self, unit: Unit) -> float:
        """What is kept of the gradients of ``unit`` between microbatches."""
        return self._reducing(unit) if self.ranks.zero <= 1 else self.shard(unit)

    def shard(self, unit: Unit) -> float:
        """Return what is kept of the gradients of ``unit`` when they are reduced, but over replicas."""
        wide = self.ranks.reduce if self.ranks.is_replicated else self.ranks.master
        return wide * (unit.dense / self.ranks.dense + unit.expert / self.ranks.expert)

    def _reducing(self, unit: Unit) -> float:
        return self.ranks.reduce * (unit.dense + unit.expert)

    @property
    def _first_unit(self) -> Unit:
        return self.plan.root if self.plan.root.dense else self.plan.units[0]

    def moments(self, instant: Instant) -> Iterator[Moment]:
        """Yield what is held in the moments of one action, beside what other microbatches and stages hold."""
        runs = {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}
        yield from runs[instant.kind](instant)

    def _had(self, instant: Instant) -> float:
        return self.gradients if instant.has_gradients[instant.chunk] else 0.0

    def _forward(self, instant: Instant) -> Iterator[Moment]:
        plan, ranks, sizes = self.plan, self.ranks, self.sizes
        is_gathering = ranks.drops_each or (instant.is_first and not ranks.is_pipeline)
        had = self._had(instant)
        for place in self._last_of_each:
            copies = self.copies
            if ranks.zero == 3:
                copies = self.root_copies + self._copy(plan.units[place])
            elif is_gathering:
                copies = self.root_copies + self._copied[place + 1]
            work = self._kept[place] + plan.layers[place].forward + sizes.rotation
            if not plan.has_embedding and (sizes.saves_input or place == 0):
                work -= sizes.stream  # what was received is counted where it was
            passing = self._passing(plan.units[place]) if is_gathering else 0.0
            yield "forward", {"weights": copies, "gradients": had, "activations": work, "buffers": passing}
        begun = sizes.stream + sizes.rotation
        if is_gathering:
            copies = self.root_copies + self._copied[1]
            passing = self._passing(plan.root) + self._passing(plan.units[0])
            yield "forward", {"weights": copies, "gradients": had, "buffers": passing, "activations": begun}
        elif instant.is_first:
            # The whole stage is gathered before its first forward.
            most = max(map(self._passing, (plan.root, plan.units[0])))
            yield "forward", {"weights": self.copies, "buffers": most, "activations": begun}
        if plan.has_head:
            copies = self.root_copies if ranks.zero == 3 else self.copies
            passing = self._passing(plan.units[-1]) if is_gathering else 0.0
            yield "loss", {
                "weights": copies, "gradients": had, "activations": self.kept, "buffers": passing,
                "logits": self._loss(),
            }  # fmt: skip

    def _loss(self) -> float:
        """The logits of a chunk and a narrow copy, and a product of the head's size; where there are more chunks, the
        logits of the one before instead."""
        sizes, ranks = self.sizes, self.ranks
        narrow = ranks.compute if ranks.compute < 4 else 0.0
        numbers = min(sizes.logits, CHUNK_LOGITS) * (ranks.wide + narrow)
        before = min(max(sizes.logits - CHUNK_LOGITS, 0.0), CHUNK_LOGITS) * ranks.wide
        return self.after_loss + sizes.gathered + numbers + max(ranks.wide * sizes.vocabulary, before)

    def _backward(self, instant: Instant) -> Iterator[Moment]:
        plan, ranks, sizes = self.plan, self.ranks, self.sizes
        adds = ranks.adds and not instant.is_first
        drops = ranks.drops_each or (instant.is_last and (ranks.zero == 2 or not ranks.is_pipeline))
        had = self._had(instant)
        # An embedding that the backward before has let go of is not gathered again.
        outside = self.root_copies if plan.has_head or instant.is_open[instant.chunk] else 0.0
        head = ranks.compute * sizes.vocabulary if plan.has_head else 0.0
        if plan.has_head:
            is_gathering = ranks.zero == 3
            yield "backward", {
                "weights": self.root_copies if is_gathering else self.copies, "gradients": had + head,
                "activations": self.kept, "logits": self.after_loss + sizes.gathered,
                "buffers": self._passing(plan.units[-1]) if is_gathering else 0.0,
            }  # fmt: skip
        head = 0.0 if adds else head
        for place in {self._top, max(self._top - 1, 0), 0, min(1, self._top), *self._last_of_each}:
            unit = plan.units[place]
            kept = self._kept[place] + sizes.rotation
            if sizes.saves_input and not plan.has_embedding and place > 0:
                kept -= sizes.stream
            copies = self.copies
            if ranks.zero == 3:
                copies = outside + self._copy(unit)
            elif drops:
                copies = self.root_copies + self._copied[place + 1]
            coming = self._passing(plan.units[place - 1]) if ranks.zero == 3 and place else 0.0
            gradients = had + head + self._above(instant, place)
            leaving = self._reducing(plan.units[place + 1]) if self._reduces(instant) and place < self._top else 0.0
            work = (plan.adding if adds else plan.layers)[place].backward
            if not plan.has_head and place == self._top:
                work -= sizes.stream
            if sizes.saves_input and not plan.has_embedding and place == 0:
                work -= sizes.stream
            yield "backward", {
                "weights": copies, "gradients": gradients, "activations": kept + work, "buffers": coming + leaving,
            }  # fmt: skip
            kept += sizes.stream
            if self._reduces(instant):
                # Gradients go into the buffer that is reduced; weights that are done with are gone.
                fresh = self._copy(unit) if ranks.zero >= 2 or instant.is_first else 0.0
                yield "backward", {
                    "weights": copies - (self._copy(unit) if drops else 0.0), "gradients": gradients + fresh,
                    "activations": kept, "buffers": coming + self._reducing(unit),
                }  # fmt: skip
            elif instant.is_first and ranks.reduce != ranks.compute:
                largest = ranks.compute * unit.largest
                yield "backward", {
                    "weights": copies, "gradients": gradients + self._reducing(unit) + largest, "activations": kept,
                    "buffers": coming,
                }  # fmt: skip
        yield from self._outside(instant, adds=adds, drops=drops)

    def _reduces(self, instant: Instant) -> bool:
        return self.ranks.zero >= 2 or (instant.is_last and not self.ranks.is_pipeline)

    def _above(self, instant: Instant, place: int) -> float:
        """What gradients of the layers above ``place`` there are by then, beside those of earlier microbatches."""
        summed = self._summed[-1] - self._summed[place + 1]
        sharded = self._sharded[-1] - self._sharded[place + 1]
        if not self._reduces(instant):
            return summed if instant.is_first else 0.0
        if instant.is_first:
            return sharded
        return sharded - summed if self.ranks.zero <= 1 else 0.0

    def _outside(self, instant: Instant, *, adds: bool, drops: bool) -> Iterator[Moment]:
        """The end of a backward: embedding and head."""
        ranks, root, sizes = self.ranks, self.plan.root, self.sizes
        if not root.dense:
            return
        one = ranks.compute * sizes.vocabulary
        embedding = one if self.plan.has_embedding else 0.0
        head = one if self.plan.has_head and not adds else 0.0
        is_tied = self.plan.has_head and self.plan.has_embedding and root.dense < 1.5 * sizes.vocabulary
        stays = 0.0 if drops else self._copied[-1]
        gradients = self._had(instant) + self._above(instant, -1)
        reduces = self._reduces(instant)
        yield "backward", {
            "weights": stays + self.root_copies, "gradients": gradients + embedding * (1 + is_tied) + head,
            "activations": sizes.stream, "buffers": self._reducing(self.plan.units[0]) if reduces else 0.0,
        }  # fmt: skip
        left = stays + (0.0 if drops else self.root_copies)
        if reduces:
            own = embedding + head if ranks.zero >= 2 or instant.is_first else 0.0
            whole = 0.0 if own else self._reducing(root)
            out = ranks.reduce * root.dense / ranks.dense
            is_widened = ranks.reduce != ranks.master and not ranks.is_replicated
            widened = ranks.master * root.dense / ranks.dense if is_widened else 0.0
            # What was not gathered for this backward keeps its gradient until it is reduced.
            is_freed = ranks.zero < 3 or instant.is_open[instant.chunk]
            copied = embedding if is_freed else 0.0
            for made, still in ((0.0, own), (out, own - copied - whole), (out + widened, -whole)):
                yield "backward", {
                    "weights": left, "gradients": gradients + still, "activations": sizes.stream,
                    "buffers": self._reducing(root) + made,
                }  # fmt: skip
        elif instant.is_first and ranks.reduce != ranks.compute:
            yield "backward", {
                "weights": left, "gradients": gradients + self._reducing(root) + one, "activations": sizes.stream,
            }  # fmt: skip

    def _inputs(self, instant: Instant) -> Iterator[Moment]:
        """The first part of a split backward: nothing is freed, and gradients of outputs stay for the second."""
        yield "backward", {
            "weights": self.copies, "gradients": self._had(instant), "logits": self.after_loss,
            "activations": self.split + self.sizes.norm_work,
        }  # fmt: skip

    def _weights(self, instant: Instant) -> Iterator[Moment]:
        """The second part of a split backward: gradients of all weights, reduced when all are there."""
        had, ranks, plan = self._had(instant), self.ranks, self.plan
        yield "backward", {
            "weights": self.copies, "gradients": had, "logits": self.after_loss,
            "activations": self.split + sum(layer.runs for layer in plan.layers),
        }  # fmt: skip
        fresh = 0.0 if ranks.adds and not instant.is_first else self.copies
        yield "backward", {"weights": self.copies, "gradients": had + fresh}
        summed = sum(map(self._reducing, (*plan.units, plan.root)))
        if ranks.zero >= 2:
            first = self._first_unit
            copies = self.copies - (self._copy(first) if instant.is_last else 0.0)
            yield "backward", {"weights": copies, "gradients": had + summed, "buffers": self._reducing(first)}
        elif instant.is_first:
            extra = 0.0 if ranks.adds else ranks.compute * max(unit.largest for unit in plan.units)
            yield "backward", {"weights": self.copies, "gradients": summed + extra}

    def reduction(self) -> Iterator[Moment]:
        """Yield what is held when a pipeline's stage reduces its gradients, after its last backward, up to ZeRO-1."""
        yield "backward", {"weights": self.copies, "gradients": self.gradients}
        yield "backward", {
            "weights": self.copies - self._copy(self._first_unit), "gradients": self.gradients,
            "buffers": self._reducing(self._first_unit),
        }  # fmt: skip
