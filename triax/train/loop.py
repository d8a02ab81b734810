"""The run from its first step to its last: read, step, judge, save, tell."""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from triax.checkpoint.agree import Ranks
from triax.checkpoint.save import CheckpointWriter
from triax.data.batch import Batches, batches_of
from triax.data.corpus import Corpus
from triax.errors import Preempted, StoppedByGuard, TriaxError
from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.spec.flops import attended_by
from triax.spec.model import ModelSpec
from triax.spec.plan import Plan
from triax.spec.run import Run
from triax.spec.weights import num_active_parameters, num_parameters
from triax.train.assemble import assemble
from triax.train.cadence import Cadence, least_lost
from triax.train.fast_tier import FastTier
from triax.train.guard import Guard, StepReport
from triax.train.learning_rate import learning_rate
from triax.train.mend import Mender
from triax.train.origin import began_with, begin
from triax.train.pace import Pace
from triax.train.replicas import Replicas
from triax.train.reporter import Reporter
from triax.train.rollback import Past
from triax.train.run_folder import RunFolder, write_atomically
from triax.train.saver import Saver
from triax.train.state import TrainState, restore, tensors_of
from triax.train.step import PendingReport, Stepper
from triax.train.stop import StopWish
from triax.train.timeline import save_timeline
from triax.train.upload import fetch_if_none, open_uploader
from triax.units import format_count
from triax.watch.metrics import StepRecord

_ATTENTION_SAMPLE = 256
"""Sequences whose documents are measured to know how far attention reaches."""


def train(
    plan: Plan, folder: RunFolder, process: Process, corpus: Corpus, *, run_text: str = "",
    wish: StopWish | None = None, progress: Progress | None = None, quiet: bool = False,
) -> None:  # fmt: skip
    """Train ``plan`` from the newest checkpoint in ``folder`` (or from the start) to its last step.

    ``run_text`` is the run file as the user wrote it, empty where there is none; ``wish`` says when this rank is asked
    to stop (None: never); ``progress`` is told what this rank does. Raises Preempted where a rank was asked to stop and
    the state is saved, StoppedByGuard where numbers cannot be right, BadInput where the folder's checkpoints cannot be
    gone on from: nothing is written then.
    """
    run, layout = plan.run, plan.layout
    progress = progress or Progress(device=process.device)
    batches = batches_of(
        corpus, seq_len=run.data.seq_len, attend_across_documents=run.data.attend_across_documents,
        eval_sequences=run.eval.sequences, seed=run.train.seed,
    )  # fmt: skip
    parts = assemble(run, layout, process, batches, progress)
    stages, optimizer, stepper = parts.stages, parts.optimizer, parts.stepper
    disk_group = dist.new_group(backend="gloo")
    data_fingerprint = corpus.fingerprint
    tier = FastTier(plan, folder, process, disk_group)
    not_fetched = fetch_if_none(plan, folder, Ranks.of(disk_group))
    state, checkpoint, passed_over = restore(
        folder, plan, data_fingerprint, tensors_of(stages, optimizer), disk_group, tier.newest
    )
    began_as = begin(stages, run, layout, disk_group) if checkpoint is None else began_with(checkpoint)
    optimizer.copy_tied()
    writer = CheckpointWriter(
        folder.checkpoints, disk_group, run.checkpoint.keep, run=plan.fingerprint, permit=folder.refuse_superseded
    )
    if process.rank == 0:
        folder.refuse_superseded()
        folder.write_plan(plan, run_text)
    with Reporter(plan, folder, process, _attended(run.model, batches), quiet=quiet) as reporter:
        for reason in not_fetched + passed_over:
            reporter.warn(f"{reason} Going on from step {state.step}.")
            reporter.event("checkpoint_refused", state.step, {"reason": reason})
        reporter.say(_opening(plan, process, batches, state))
        if state.step >= run.train.steps:
            reporter.say(_complete(state, run))
            return
        is_from_memory = checkpoint is not None and checkpoint.folder.parent != folder.checkpoints
        detail = {"layout": layout.describe(), "init": began_as, "from_memory": is_from_memory}
        reporter.event("start" if checkpoint is None else "resume", state.step, detail)
        guard = Guard(run.guard, run.model, run.sequences_per_step)
        if checkpoint is None and began_as is None and run.guard.check_initial_loss:
            guess = guard.judge_guess(stepper.loss_of_guessing(state.next_sample))
            if guess.verdict == "stop":
                raise StoppedByGuard(guess.reason)
        rule = least_lost(run.checkpoint, process.num_servers)
        cadence = Cadence(run.checkpoint.every_steps, rule, Ranks.of(disk_group), state.step)
        tier.begin(writer, state.step, checkpoint, reporter)
        uploader = open_uploader(plan, folder, Ranks.of(disk_group))
        saver = Saver(writer, stages, optimizer, plan, data_fingerprint, began_as, reporter, cadence, tier, uploader)
        past = Past(plan, folder, data_fingerprint, stages, optimizer, writer, disk_group)
        mender = Mender(guard, past, Replicas(stages, optimizer, layout), saver, reporter, run, layout)
        reads_late = process.device.type == "cuda"
        wish = wish or StopWish()
        pace = Pace(layout, process, progress, reporter, run.watch.straggler_above)
        loop = _Loop(
            plan, folder, process, stepper, progress, pace, batches, guard, mender, reporter, saver, wish, reads_late,
            state,
        )  # fmt: skip
        with progress.clock.following():
            try:
                loop.run()
            except StoppedByGuard:
                tier.end()  # nobody goes on from what the guard has stopped
                raise


def _opening(plan: Plan, process: Process, batches: Batches, state: TrainState) -> str:
    run = plan.run
    parameters = f"{format_count(num_parameters(run.model))} parameters"
    if run.model.experts is not None:
        parameters += f", of which a token meets {format_count(num_active_parameters(run.model))}"
    lines = [
        f"{parameters}, {format_count(run.tokens_per_step)} tokens a step, "
        f"{run.train.steps} steps, {format_count(batches.corpus.num_tokens)} tokens of text "
        f"(run {plan.fingerprint})",
        f"layout: {plan.layout.describe()}, {plan.layout.microbatches} microbatches of "
        f"{plan.layout.sequences_per_microbatch} x {run.data.seq_len} tokens on {process.world_size} ranks",
    ]
    if process.world_size > 1:
        lines.append(f"replicas: {plan.layout.describe_replicas(has_experts=run.model.experts is not None)}")
    if run.init is not None and not state.step:
        lines.append(f"weights: from {run.init}; optimizer state at zero")
    if state.step:
        rate = learning_rate(state.step, run.learning_rate, run.train.steps)
        lines.append(
            f"resumed: step {state.step}, {format_count(state.tokens)} tokens, next sample {state.next_sample} "
            f"({batches.describe_epochs(state.next_sample)}), lr {rate:.2e}; weights and optimizer state restored"
        )
    return "\n".join(lines)


def _complete(state: TrainState, run: Run) -> str:
    """Return what to say of a run that has reached its last step before."""
    return (
        f"complete: {state.step} steps were trained before, and train.steps={run.train.steps} asks for no more; with a "
        f"larger train.steps the run goes on from here."
    )


def _attended(model: ModelSpec, batches: Batches) -> float:
    """Return how many positions a token attends to on average, over sequences from all of the corpus."""
    sequences = batches.sequences
    if batches.sequences.attend_across_documents:
        return attended_by(model, [sequences.seq_len])
    stride = max(len(sequences) // _ATTENTION_SAMPLE, 1)
    rows = (sequences[index].document_lengths for index in range(0, len(sequences), stride))
    return attended_by(model, (int(length) for row in rows for length in row))


@dataclass(slots=True)
class _Pending:
    """A step that was taken and not judged yet."""

    report: PendingReport
    before: TrainState
    """The state that it was taken from."""
    next_sample: int
    """The first sample of the step after it."""
    data_s: float


@dataclass(slots=True)
class _Loop:
    """The moving part of a run: its state and the step that is not judged yet.

    Where the device works behind the host's back (``reads_late``), a step's numbers are read when the next step is
    enqueued, so that the device never waits. Whether a step's update stands was decided on the device; what the host
    decides (to save, to stop, to go back) comes after the read. A step behind one that was left out was left out too.
    """

    plan: Plan
    folder: RunFolder
    process: Process
    stepper: Stepper
    progress: Progress
    pace: Pace
    batches: Batches
    guard: Guard
    mender: Mender
    reporter: Reporter
    saver: Saver
    wish: StopWish
    reads_late: bool
    state: TrainState
    wants_stop: bool = False
    pending: _Pending | None = None
    mark_s: float = field(default_factory=time.perf_counter)
    """When the last step was read."""

    @property
    def run_spec(self) -> Run:
        return self.plan.run

    def run(self) -> None:
        """Step until the last step, a wish to stop, or a verdict that says stop; save at the end."""
        run = self.run_spec
        first = saved = self.state.step
        while self.state.step < run.train.steps and not self.wants_stop:
            stands = self._take_step()
            self.saver.poll()
            done = self.state.step
            is_eval_due, is_save_due = _is_due(done, run.eval.every_steps), self.saver.is_due(done)
            is_copy_due = self.saver.is_copy_due(done)
            is_last = done == run.train.steps
            is_inspection_due = self.mender.is_due(done, before_save=is_save_due or is_last)
            must_read = (
                is_eval_due or is_save_due or is_copy_due or is_inspection_due or is_last or done == first + 1
            )  # fmt: skip
            if stands and (not self.reads_late or must_read):
                stands = self._settle(with_eval=is_eval_due)
            if stands and is_inspection_due:
                stands = self._inspect()
            if not stands:
                saved = self.state.step if self.state.step < saved else saved
                continue
            if is_save_due and not is_last:
                self.progress.enter("saving")
                self.saver.save(self.state, wait=not run.checkpoint.background)
                saved = done
            if is_copy_due and done < run.train.steps:
                self.progress.enter("copying to memory")
                self.saver.copy(self.state)
        self._settle(with_eval=False)
        self.progress.enter("saving")
        self.saver.last_step = self.state.step
        is_inspection_due = self.mender.is_due(self.state.step, before_save=True)
        if saved != self.state.step and (not is_inspection_due or self._inspect()):
            self.saver.save(self.state, wait=True)
        self.saver.finish()
        self._end()

    def _take_step(self) -> bool:
        """Enqueue a step, then judge the one before it; return False where that one does not stand."""
        run, state = self.run_spec, self.state
        limits = self.guard.limits(state.guard, newest_is_unread=self.pending is not None)
        started_s = time.perf_counter()
        self.pace.begin()
        batches = self.stepper.read_batches(state.next_sample)
        self.pace.read()
        data_s = time.perf_counter() - started_s
        is_timed = state.step + 1 in run.watch.timeline_steps
        if is_timed:
            self.progress.time_actions()
        report = self.stepper.take(
            state.step, batches, asks_stop=self.wish.is_asked, bounds=limits, rate_factor=state.rate_factor,
            behind=None if self.pending is None else self.pending.report,
        )  # fmt: skip
        if is_timed:
            save_timeline(self.progress, state.step + 1, self.plan.layout, self.process, self.folder)
        self.pace.end(state.step + 1)
        if not self._settle(with_eval=False):
            return False
        after = self.state.after_step(run)
        self.pending = _Pending(report, self.state, after.next_sample, data_s)
        self.state = after
        return True

    def _settle(self, *, with_eval: bool) -> bool:
        """Read, judge and tell the step that is not judged yet, if there is one; return False where it does not stand.

        The state is then the one to go on from.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return True
        report = pending.report.read()
        step_s = time.perf_counter() - self.mark_s
        judgement = self.guard.judge(report, self.state.guard, pending.before.next_sample)
        stands = judgement.verdict == "commit"
        eval_loss = self.stepper.evaluate() if with_eval and stands else None
        self.mark_s = time.perf_counter()
        self._tell(report, pending, step_s, eval_loss)
        self.wants_stop = self.wants_stop or report.wants_stop
        if stands:
            self.state = replace(self.state, guard=judgement.state)
            self.mender.close(judgement, report)
        else:
            self.state = self.mender.undo(judgement, pending.before, self.state)
        return stands

    def _inspect(self) -> bool:
        """Compare what ranks hold; return False where they disagree. The state is then the one to go on from."""
        self.progress.enter("comparing replicas")
        found = self.mender.inspect(self.state)
        if found is not None:
            self.state = found
        return found is None

    def _tell(self, report: StepReport, pending: _Pending, step_s: float, eval_loss: float | None) -> None:
        run = self.run_spec
        reading = self.reporter.meter.read()
        self.reporter.step(
            StepRecord(
                step=report.step + 1,
                tokens=(report.step + 1) * run.tokens_per_step,
                loss=report.loss,
                grad_norm=report.grad_norm,
                lr=pending.before.rate_factor * learning_rate(report.step, run.learning_rate, run.train.steps),
                tokens_in_step=run.tokens_per_step,
                step_s=step_s,
                data_s=pending.data_s,
                checkpoint_stall_s=self.saver.take_stall_s(),
                peak_active_bytes=reading.peak_active_bytes,
                peak_reserved_bytes=reading.peak_reserved_bytes,
                utilization=reading.utilization,
                sample_hash=self.batches.step_hash(pending.before.next_sample, run.sequences_per_step),
                eval_loss=eval_loss,
                experts=report.experts,
            )
        )
        for name, times in self.batches.exhausted(pending.before.next_sample, pending.next_sample).items():
            self.reporter.event("epoch", report.step + 1, {"source": name, "epochs": times})
            if times == 1:
                self.reporter.say(f"data: source {name} was read to its end, and is read again in another order")

    def _end(self) -> None:
        step, last = self.state.step, self.run_spec.train.steps
        if self.saver.failure:
            raise TriaxError(
                f"step {step} was trained and could not be saved: {self.saver.failure}; the checkpoints before it "
                f"still stand, and the same command goes on from the newest."
            )
        self.saver.end()
        if step >= last:
            self.reporter.event("done", step)
            self.reporter.say(f"done: {step} steps, state in {self.folder.checkpoints}")
            return
        if self.reporter.is_voice:
            with suppress(OSError):  # the state is saved, which counts; the agent will doubt it
                write_atomically(self.folder.stopped, f'{{"step": {step}}}\n')
        self.reporter.event("stop", step, {"reason": "asked to stop"})
        raise Preempted(
            f"stopped after step {step} of {last} as asked, state saved; the same command goes on from here."
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
