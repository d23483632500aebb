"""The training loop: batches in, steps, metrics, evaluations and checkpoints out."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from model.flops import training_flops_per_token
from recipes.cluster.host_memory import give_back_freed_memory
from recipes.config.ds_check import autotp_size
from recipes.data.conversation_data import evaluation_batches
from recipes.data.corpus import PreparedCorpus
from recipes.data.loader import StepBatch, TrainingData, heldout_rows, step_batches
from recipes.training.checkpoint import CheckpointWriter
from recipes.training.checkpoint_files import TrainingState, checkpoints_folder
from recipes.training.device_peak import device_peak_flops
from recipes.training.evaluation import Evaluation, evaluate
from recipes.training.instruments import Instruments
from recipes.training.loss_scale import UpdateControl
from recipes.training.metrics import MetricsWriter, step_metrics
from recipes.training.moving_average import MovingAverage
from recipes.training.plan_run import RunPlan
from recipes.training.run_log import logger
from recipes.training.spikes import SpikeWatch, next_sample
from recipes.training.stability import FiniteWatch
from recipes.training.step import StepResult, train_step
from recipes.training.stop_signals import StopSignals
from recipes.training.token_schedules import bias_update_speed_at, mtp_loss_weight_at, parse_later_weight

SIGNALLED, WRITTEN = 0, 1  # places in a step's votes


@dataclass
class TrainingRun:
    """What one run trains, with what, on what, and where it stands."""

    plan: RunPlan
    engine: Any
    data: TrainingData
    heldout: list[PreparedCorpus]
    state: TrainingState
    signals: StopSignals = field(default_factory=StopSignals)
    stopped_by: str | None = None  # the signal that ended the run before its last step
    moving_average: MovingAverage | None = None

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer kept with the data."""
        return self.heldout[0].tokenizer_folder

    def train(self) -> Evaluation | None:
        """Train to the last step; returns the last evaluation (None where nothing is held out)."""
        writer = None
        if self.plan.launch.is_main:
            writer = MetricsWriter(self.plan.folder, self.engine.monitor, self.state.step)
        if self.plan.config.save_on_exit_signal:
            self.signals.install()
        give_back_freed_memory()
        evaluation = None
        with (
            self._progress_bar() as bar,
            contextlib.closing(writer) if writer else contextlib.nullcontext(),
            Instruments(self.plan, self.engine, self.state.step) as instruments,
        ):
            batches = self._batches()
            while self.state.step < self.plan.resolved.max_steps:
                instruments.begin_step(self.state.step + 1)
                begin = time.perf_counter()  # a step's time is the step's alone, without evaluation and saving
                if self._passes_over():
                    batches = self._batches()
                batch = instruments.fetch(batches)
                result = self._take_step(batch)
                if self._rewinds(writer):
                    batches, bar.n = self._batches(), self.state.step
                    continue
                seconds = time.perf_counter() - begin
                ranks_line, growths = instruments.end_step(self.state.step, seconds)
                line = self._measure(batch, result, seconds) | ranks_line
                if writer:
                    writer.write(line)
                    for growth in growths:
                        writer.write_event("memory_growth", self.state.step, **asdict(growth))
                _show(bar, line)
                self._end_if_hopeless(batch, result)
                evaluated = self._due(self.plan.config.eval_steps)
                if evaluated:
                    evaluation = self._evaluate(writer)
                self.stopped_by = self._stop_asked_for(result)
                # after a skipped step the loss scale is in motion; at its end a run saves all the same
                last = self.state.step == self.plan.resolved.max_steps
                due = self._due(self.plan.config.save_steps) and (last or not self._finite_watch.in_a_row)
                if due or self.stopped_by:
                    self._save(evaluation if evaluated else None, writer)
                elif result.votes[WRITTEN] == self.plan.launch.world_size:
                    self.writer.finish()
                if self.stopped_by:
                    break
            self.writer.close()
        return evaluation

    def _votes(self) -> list[float]:
        """What this rank tells the others with each step's losses."""
        return [self.signals.received is not None, self.writer.is_written]

    def _stop_asked_for(self, result: StepResult) -> str | None:
        """The signal that some rank got, so that all stop at the same step."""
        return (self.signals.received or "a stop signal on another rank") if result.votes[SIGNALLED] else None

    @functools.cached_property
    def writer(self) -> CheckpointWriter:
        """Saves this run's checkpoints."""
        return CheckpointWriter(
            self.engine,
            checkpoints_folder(self.plan.folder),
            self.plan.model.to_dict(),
            self.tokenizer_folder,
            total_limit=self.plan.config.save_total_limit,
            background=self.plan.config.async_save,
        )

    def _take_step(self, batch: StepBatch) -> StepResult:
        """One optimizer step, with this step's batch size and weights, and its count in the state."""
        state = self.state
        global_batch_size = self.plan.resolved.batch_plan.batch_at(state.step)
        if self.engine.train_batch_size() != global_batch_size:
            self.engine.set_train_batch_size(global_batch_size)
        self.engine.module.mtp_loss_weight = self._mtp_loss_weight()
        result = train_step(
            self.engine,
            self._control,
            self._on_device(batch),
            self._bias_update_speed(),
            batch.source_ids,
            len(self.data.corpora),
            self._votes,
            leave_out=functools.partial(self._spike_watch.is_unwanted, state.recent_losses),
            log_group_norms=self.plan.config.log_group_norms,
        )
        state.step += 1
        state.samples += global_batch_size
        state.tokens += result.label_tokens
        state.skipped_steps += not result.applied
        self._spike_watch.remember(state.recent_losses, result.loss)
        if self.moving_average and result.applied:
            self.moving_average.update(state.step)
        return result

    def _on_device(self, batch: StepBatch) -> list[dict[str, Tensor]]:
        device = self.engine.device
        return [
            {name: tensor.to(device, non_blocking=True) for name, tensor in micro.items()}
            for micro in batch.micro_batches
        ]

    def _rewinds(self, metrics: MetricsWriter | None) -> bool:
        """Answer a spike of the step's loss; whether training goes on from a checkpoint."""
        count = self.plan.resolved.batch_plan.batch_at(self.state.step - 1)
        state = self._spike_watch.answer(self.state, self.plan.layout, count, self.writer.finish, metrics)
        self.state = state or self.state
        if state and self.moving_average:
            self.moving_average.go_on_from(state.step)
        return state is not None

    def _passes_over(self) -> bool:
        """Move on over sequences that a rewind has excluded; whether there were any here."""
        state, before = self.state, self.state.samples
        state.samples = next_sample(before, self.plan.resolved.batch_plan.batch_at(state.step), state.passed_over)
        return state.samples != before

    def _measure(self, batch: StepBatch, result: StepResult, seconds: float) -> dict[str, Any]:
        """The step's line of metrics.jsonl."""
        line = step_metrics(
            result,
            self.engine,
            step=self.state.step,
            tokens=self.state.tokens,
            skipped_steps=self.state.skipped_steps,
            epoch=batch.epoch,
            seconds=seconds,
            batch_tokens=self.plan.resolved.batch_plan.batch_at(self.state.step - 1) * self.plan.seq_length,
            flops_per_token=self._flops_per_token,
            peak_flops=self._peak_flops,
        )
        return line | self._by_source(result) if len(self.data.corpora) > 1 else line

    def _end_if_hopeless(self, batch: StepBatch, result: StepResult) -> None:
        """Warn of a step that was not finite; raises TrainingFault where no later one can be good."""
        watch, state = self._finite_watch, self.state
        warning = watch.look(state.step, result, state.skipped_steps)
        if warning and self.plan.launch.is_main:
            print(warning, flush=True)
        why = watch.hopeless(result)
        if why:
            self.writer.close()
            raise watch.fault(state.step, why, result, self._on_device(batch))

    @functools.cached_property
    def _control(self) -> UpdateControl:
        return UpdateControl(self.engine)

    @functools.cached_property
    def _finite_watch(self) -> FiniteWatch:
        checkpoints, limit = checkpoints_folder(self.plan.folder), self.plan.config.max_nonfinite_steps
        return FiniteWatch(self.engine, self._control, checkpoints, self.plan.dtype, limit)

    @functools.cached_property
    def _spike_watch(self) -> SpikeWatch:
        return SpikeWatch(self.engine, self.plan.config, checkpoints_folder(self.plan.folder))

    @functools.cached_property
    def _flops_per_token(self) -> float:
        return training_flops_per_token(self.plan.model, self.plan.seq_length)

    @functools.cached_property
    def _peak_flops(self) -> float:
        return device_peak_flops(self.engine.device, next(self.engine.module.parameters()).dtype)

    def _batches(self) -> Iterator[StepBatch]:
        plan, resolved = self.plan, self.plan.resolved
        return step_batches(
            self.data,
            batch_plan=resolved.batch_plan,
            first_step=self.state.step,
            # another global batch than before the resume: go on at the next sequence, lose and repeat none
            sample_offset=self.state.samples - resolved.batch_plan.samples_before(self.state.step),
            micro_batch_size=resolved.micro_batch_size,
            rank=plan.data_rank,
            world_size=plan.data_ranks,
            num_workers=plan.num_workers,
            pin_memory=self.engine.device.type == "cuda",
        )

    def _bias_update_speed(self) -> float:
        tokens = self.plan.resolved.batch_plan.tokens_before(self.state.step)
        return bias_update_speed_at(
            tokens, self.plan.model.bias_update_speed, self.plan.config.bias_update_until_tokens
        )

    def _mtp_loss_weight(self) -> float:
        tokens = self.plan.resolved.batch_plan.tokens_before(self.state.step)
        later = self.plan.config.mtp_loss_weight_later
        return mtp_loss_weight_at(tokens, self.plan.model.mtp_loss_weight, parse_later_weight(later) if later else None)

    def _by_source(self, result: StepResult) -> dict[str, Any]:
        """Loss of each source of a mixture, and how often each has been gone through."""
        names = [corpus.folder.name for corpus in self.data.corpora]
        losses = [None if math.isnan(loss) else loss for loss in result.source_losses]
        return {
            "source_loss": dict(zip(names, losses, strict=True)),
            "source_epochs": dict(zip(names, self.data.repeats(self.state.samples), strict=True)),
        }

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now."""
        step = self.state.step
        return step == self.plan.resolved.max_steps or (every > 0 and step % every == 0)

    def _evaluate(self, writer: MetricsWriter | None) -> Evaluation | None:
        evaluation = evaluate_heldout(self.engine, self.plan, self.heldout)
        if evaluation and writer:
            writer.write(
                {
                    "step": self.state.step,
                    "eval_loss": evaluation.loss,
                    "eval_bits_per_byte": evaluation.bits_per_byte,
                }
                | ({} if evaluation.mtp_acceptance is None else {"eval_mtp_acceptance": evaluation.mtp_acceptance})
            )
        if evaluation:
            logger.info("step %d: held-out loss %.4f nats per token", self.state.step, evaluation.loss)
        return evaluation

    def _save(self, evaluation: Evaluation | None, metrics: MetricsWriter | None) -> None:
        state = self.state
        self._finite_watch.check_weights(state.step)
        best = evaluation is not None and evaluation.loss <= (state.best_eval_loss or evaluation.loss)
        if best and evaluation:
            state.best_eval_loss = evaluation.loss
        if self.moving_average:
            self.moving_average.save(state.step)
        stall = self.writer.save(state, best)
        if metrics:
            metrics.write_event("save", state.step, stall_seconds=round(stall, 4))
        logger.info("step %d: checkpoint; training stood still for %.3f s", state.step, stall)

    def _progress_bar(self) -> tqdm:
        return tqdm(
            total=self.plan.resolved.max_steps,
            initial=self.state.step,
            desc="training",
            unit="step",
            disable=not self.plan.launch.is_main,
            dynamic_ncols=True,
        )


def _show(bar: tqdm, line: dict[str, Any]) -> None:
    bar.set_postfix_str(
        f"loss {line['loss']:.3f}, lr {line['learning_rate']:.2e}, {line['tokens_per_second']:,.0f} tokens/s",
        refresh=False,
    )
    bar.update()


def evaluate_heldout(engine: Any, plan: RunPlan, heldout: list[PreparedCorpus]) -> Evaluation | None:
    """Loss over the held-out part of all sources, or --eval_tokens of it; None where nothing is held out."""
    heldout = [corpus for corpus in heldout if corpus.num_tokens > 1]
    if not heldout:
        return None
    rows = [heldout_rows(corpus, plan.seq_length) for corpus in heldout]
    taken = share_evenly(rows, -(-plan.config.eval_tokens // plan.seq_length) or sum(rows))
    # of the rows that are left out the bytes are not known: as many as of the others
    text_bytes = sum(corpus.num_bytes * part / whole for corpus, part, whole in zip(heldout, taken, rows, strict=True))
    # Ranks that share matrices need the same sequences; those that share sequences evaluate whole ones, each its own.
    copies = autotp_size(plan.resolved.config)
    share_batches = functools.partial(
        evaluation_batches,
        seq_length=plan.seq_length,
        micro_batch_size=plan.resolved.micro_batch_size,
        rank=plan.launch.rank // copies,
        world_size=plan.launch.world_size // copies,
        document_mask=plan.config.document_mask,
    )
    batches = itertools.chain.from_iterable(
        share_batches(corpus, most_rows=part) for corpus, part in zip(heldout, taken, strict=True)
    )
    return evaluate(engine, batches, text_bytes, copies)


def share_evenly(sizes: list[int], most: int) -> list[int]:
    """Of each size its part of `most`, rounded up; the whole where `most` is all or more."""
    return [min(size, -(-size * most // sum(sizes))) for size in sizes]
