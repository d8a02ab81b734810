"""What is trained: the mathematics of a run, and the habits around it (saving, watching, guarding).

One class per section of ``run.toml``. ``Run.fingerprint`` names the mathematics alone: two runs with equal fingerprints
must produce equal losses, on any cluster, in any layout, as far as both go and where the learning rate does not follow
from the number of steps.
"""

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from triax.spec.checkpoint_interval import FAILURES_PER_1000_SERVER_DAYS
from triax.spec.cluster import Cluster
from triax.spec.data import DataSpec
from triax.spec.layout import AxisOrder, ContextMethod, Recompute, ScheduleName
from triax.spec.legal_values import either, multiples
from triax.spec.model import ModelSpec
from triax.spec.value import LARGEST_SMALL_COUNT, Count, Counts, Every, SmallCount, Text, Texts, Value, fingerprint

FORMAT_VERSION = 1
"""Version of every file that triax writes into a run folder."""


class TrainSpec(Value):
    """How long, with how much per step, from which seed."""

    steps: Count = Field(ge=1, le=1 << 40)
    """Updates from the first to the last."""
    sequences_per_step: SmallCount | None = None
    """Sequences of one update over all ranks; give this or tokens_per_step."""
    tokens_per_step: Count | None = Field(default=None, ge=1)
    """Tokens of one update over all ranks, a multiple of data.seq_len."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Decides initial weights and the order of data."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """What torch.compile makes of each layer; inductor: fused kernels, after some seconds to minutes at the start;
    aot_eager: the graph as it was traced, to tell where compiling itself is at fault."""
    timeout_s: float = Field(default=600.0, ge=1, le=1e6)
    """How long a rank waits for its peers before it gives up."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.sequences_per_step is None) == (self.tokens_per_step is None):
            raise ValueError("give exactly one of sequences_per_step and tokens_per_step.")
        return self


class OptimizerSpec(Value):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) or plain SGD."""

    name: Literal["adamw", "sgd"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Applies to matrices, not to norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""


class LearningRateSpec(Value):
    """The learning rate as a pure function of the step."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine to the final rate; wsd: warm up, stay, decay over the last decay_steps; constant after warm-up."""
    peak: float = Field(default=3e-4, gt=0)
    warmup_steps: Count = Field(default=0, ge=0)
    """Steps of linear growth from zero."""
    decay_steps: Count | None = Field(default=None, ge=1)
    """cosine: steps from the end of warm-up to the final rate (absent: all that remain). wsd: steps of the last
    decline (absent: a tenth of all steps)."""
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final rate as a part of the peak."""


class PrecisionSpec(Value):
    """In which numbers the run computes, keeps its weights, and sums its gradients."""

    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Matmuls and activations; norms, rotary embedding and loss use at least fp32."""
    master: Literal["fp32", "fp64"] = "fp32"
    """Weights and optimizer state."""
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Gradients while they are summed over microbatches and ranks."""

    @model_validator(mode="after")
    def _never_narrower_than_compute(self) -> Self:
        width = {"bf16": 2, "fp32": 4, "fp64": 8}
        for key in ("master", "reduce"):
            if width[getattr(self, key)] < width[self.compute]:
                raise ValueError(
                    f"{key}={getattr(self, key)} is narrower than compute={self.compute}: use {self.compute}."
                )
        return self


class EvalSpec(Value):
    """Loss on held-out sequences, chosen by sample number: the same ones in every layout."""

    every_steps: Count = Field(default=0, ge=0)
    """0: never."""
    sequences: Count = Field(default=0, ge=0)
    """Sequences held out of training and measured each time."""

    @model_validator(mode="after")
    def _has_something_to_measure(self) -> Self:
        if self.every_steps and not self.sequences:
            raise ValueError(f"every_steps={self.every_steps} has nothing to measure: give sequences, such as 64.")
        return self


class CheckpointSpec(Value):
    """When state is saved and how much of it is kept. The last step is always saved."""

    every_steps: Every = 500
    """0: only at the end and when the run is asked to stop; "auto": as often as loses least time, by what a save is
    measured to cost and how often servers fail (Young/Daly, ``triax.spec.checkpoint_interval``)."""
    failures_per_1000_server_days: float = Field(default=FAILURES_PER_1000_SERVER_DAYS, gt=0)
    """For "auto"."""
    memory_every_steps: Every = 0
    """Steps between copies of the state into the memory of the servers, from which most restarts go on: 0 for none;
    "auto": so that they cost a hundredth of the time at most."""
    keep: Count = Field(default=3, ge=1)
    """Newest checkpoints that stay on disk."""
    background: bool = True
    """Write while training goes on."""
    upload: Text | None = None
    """Where finished checkpoints are copied to, as a URL that fsspec knows: ``s3://bucket/run``. A run whose folder has
    none goes on from there."""


class GuardSpec(Value):
    """What happens to numbers that cannot be right, and who is told (docs/guard.md)."""

    check_initial_loss: bool = True
    """Refuse to train when random weights do not guess: their loss against random labels must be within
    initial_loss_tolerance of ln(vocab_size)."""
    initial_loss_tolerance: float = Field(default=0.05, gt=0)
    on_spike: Literal["rollback", "skip", "warn", "stop"] = "rollback"
    """What is done about a loss or gradient norm far above those before it. rollback: leave the update out, try the
    step again, pass over its samples, and go back to a checkpoint where that does not help; skip: the same without
    going back; warn: tell and train on; stop: end the run."""
    window: SmallCount = Field(default=128, ge=16, le=4096)
    """Steps whose scatter says what a spike is; no step is judged before half as many are known."""
    loss_threshold: float = Field(default=10.0, gt=0)
    """A loss is a spike so many robust standard deviations above its level, and at least a tenth of the level."""
    grad_norm_threshold: float = Field(default=12.0, gt=0)
    """The same for the logarithm of the gradient norm, and at least four times its level."""
    max_skipped_in_a_row: Count = Field(default=10, ge=1)
    """Attempts of a step that are left out, one after the other, before the run stops."""
    max_rollbacks: Count = Field(default=5, ge=0)
    """Times that a run goes back before it stops; forgiven once a window of steps went well."""
    learning_rate_cut: float = Field(default=1.0, gt=0, le=1)
    """The learning rate is multiplied by this from then on where going back alone did not help; 1.0: never cut."""
    hash_every_steps: Count = Field(default=100, ge=0)
    """Steps between comparisons of the weights that several ranks hold alike, which are also made before each save;
    0: never."""
    alert_command: Texts = ()
    """A program and its arguments, run without a shell with one event as JSON on its standard input when something is
    wrong."""
    alert_webhook: Text | None = None
    """An address that gets the same JSON in a POST."""

    @model_validator(mode="after")
    def _webhook_is_an_address(self) -> Self:
        if self.alert_webhook is not None:
            address = urlsplit(self.alert_webhook)
            if address.scheme not in ("http", "https") or not address.hostname:
                raise ValueError(
                    f"alert_webhook={self.alert_webhook!r:.200} is no address: write one that begins with https://."
                )
        return self


class RecoverSpec(Value):
    """What happens when ranks or servers are lost."""

    max_restarts: Count = Field(default=20, ge=0)
    """Restarts in a row that may gain no checkpoint; 0: the run ends with the first rank that fails."""
    same_fault: Count = Field(default=2, ge=2)
    """The run ends when it fails at the same step in the same way this many times in a row, with no checkpoint gained
    between: another restart would not help."""
    backoff_s: float = Field(default=1.0, ge=0, le=1e6)
    """Pause before the second restart in a row; each one after waits twice as long. The first comes at once."""
    max_backoff_s: float = Field(default=60.0, ge=0, le=1e6)
    """Longest pause before a restart."""
    lost_after_s: float = Field(default=15.0, ge=1, le=1e6)
    """A server that was not heard of for so long, on the shared disk or over the network, is lost to the others. One
    that could not write to the disk for half of it stops its ranks."""
    join_s: float = Field(default=60.0, ge=0, le=1e6)
    """How long the first servers wait for all that may come, before those go on that are there."""


class WatchSpec(Value):
    """What is shown and written besides ``metrics.jsonl``."""

    console_every: Count = Field(default=10, ge=1)
    """Steps between console lines."""
    tensorboard: bool = True
    timeline_steps: Counts = ()
    """Steps in which every rank writes down when it ran what, for `triax schedule --from` (1 is the first step)."""
    hang_soft_s: float | None = Field(default=None, gt=0, le=1e6)
    """Where no rank of a server moves for so long inside a step, the one to blame is named and the stacks of all are
    written; absent: 10 steps, and at least 30 s."""
    hang_hard_s: float | None = Field(default=None, ge=0, le=1e6)
    """Where none moves for so long, all ranks start again; absent: 4 times the soft limit; 0: they are waited for."""
    straggler_above: float = Field(default=0.15, ge=0, le=100)
    """A rank is named that is busy by more than this part longer than ranks with equal work; 0: none is."""

    @model_validator(mode="after")
    def _soft_before_hard(self) -> Self:
        soft_s, hard_s = self.hang_soft_s, self.hang_hard_s
        if hard_s and soft_s is not None and hard_s < soft_s:
            raise ValueError(f"hang_hard_s={hard_s:g} comes before hang_soft_s={soft_s:g}: use at least {soft_s:g}.")
        return self


class LayoutRequest(Value):
    """The ``[layout]`` section: a key given is fixed, a key absent is chosen. See ``triax.spec.layout.Layout``."""

    pp: SmallCount | None = None
    dp_replicate: SmallCount | None = None
    dp_shard: SmallCount | None = None
    cp: SmallCount | None = None
    tp: SmallCount | None = None
    ep: SmallCount | None = None
    zero: int | None = Field(default=None, ge=0, le=3)
    schedule: ScheduleName | None = None
    stages_per_rank: SmallCount | None = None
    stage_cuts: Counts | None = None
    sequences_per_microbatch: SmallCount | None = None
    microbatches: SmallCount | None = None
    cp_method: ContextMethod | None = None
    recompute: Recompute | None = None
    order: AxisOrder | None = None


class Run(Value):
    """Everything a run file says, checked; paths in it are absolute."""

    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: LearningRateSpec = LearningRateSpec()
    precision: PrecisionSpec = PrecisionSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    guard: GuardSpec = GuardSpec()
    recover: RecoverSpec = RecoverSpec()
    watch: WatchSpec = WatchSpec()
    layout: LayoutRequest = LayoutRequest()
    cluster: Cluster | None = None
    init: Text | None = None
    """The checkpoint whose weights training starts from, ``[model] init`` in a run file; absent: random weights. What
    was loaded is named by its digest in the run's checkpoints and events, not by the fingerprint."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        faults = [
            *self._length_faults(), *self._step_faults(), *self._warmup_faults(),
            *self.data.eval_faults(self.eval.sequences),
        ]  # fmt: skip
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _length_faults(self) -> list[str]:
        seq_len, limit = self.data.seq_len, self.model.max_position_embeddings
        if seq_len <= limit:
            return []
        return [
            f"data.seq_len={seq_len} is longer than model.max_position_embeddings={limit}: use at most {limit}, or "
            f"raise the limit to {seq_len}."
        ]

    def _step_faults(self) -> list[str]:
        tokens, seq_len = self.train.tokens_per_step, self.data.seq_len
        if tokens is None:
            return []
        most = LARGEST_SMALL_COUNT * seq_len
        if tokens > most:
            return [
                f"train.tokens_per_step={tokens} makes {tokens // seq_len} sequences of data.seq_len={seq_len}, and a "
                f"step has at most {LARGEST_SMALL_COUNT}: use at most {most}."
            ]
        if tokens % seq_len:
            fitting = either(multiples(seq_len, tokens))
            return [f"train.tokens_per_step={tokens} is not a multiple of data.seq_len={seq_len}: use {fitting}."]
        return []

    def _warmup_faults(self) -> list[str]:
        warmup, steps = self.learning_rate.warmup_steps, self.train.steps
        if warmup <= steps:
            return []
        return [
            f"learning_rate.warmup_steps={warmup} is more than train.steps={steps}: the peak would never be reached; "
            f"use at most {steps}."
        ]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one update over all ranks."""
        if self.train.sequences_per_step is not None:
            return self.train.sequences_per_step
        assert self.train.tokens_per_step is not None
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update over all ranks, those without a label included."""
        return self.sequences_per_step * self.data.seq_len

    def mathematics(self) -> dict[str, Any]:
        """Return what decides the losses, as plain values: never layout, cluster, paths or the number of steps.

        The content of the data has a fingerprint of its own, made when tokens are prepared. A size that is left to
        follow from others counts as what follows, so that writing it down later changes nothing. A setting of the model
        that has its default is left out, so that a run goes on after an update that brings new settings.
        """
        heads = {"num_key_value_heads": self.model.kv_heads, "head_dim": self.model.head_width}
        return {
            "model": self.model.model_dump(mode="json", exclude={"family"}, exclude_defaults=True) | heads,
            "data": self.data.mathematics(),
            "sequences_per_step": self.sequences_per_step,
            "seed": self.train.seed,
            "optimizer": self.optimizer.model_dump(mode="json"),
            "learning_rate": self.learning_rate.model_dump(mode="json"),
            "precision": self.precision.model_dump(mode="json"),
            "eval_sequences": self.eval.sequences,
        }

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name the mathematics."""
        return fingerprint(self.mathematics())
