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

import torch
from torch import Tensor
from tqdm import tqdm

from model.flops import training_flops_per_token
from recipes.config.errors import TrainingFault
from recipes.data.corpus import PreparedCorpus
from recipes.data.loader import StepBatch, TrainingData, heldout_batches, step_batches
from recipes.training.checkpoint import CheckpointWriter
from recipes.training.checkpoint_files import TrainingState, checkpoints_folder
from recipes.training.device_peak import device_peak_flops
from recipes.training.evaluation import Evaluation, evaluate
from recipes.training.instruments import Instruments
from recipes.training.metrics import MetricsWriter, step_metrics
from recipes.training.plan_run import RunPlan
from recipes.training.run_log import logger
from recipes.training.step import StepResult, train_step
from recipes.training.stop_signals import StopSignals
from recipes.training.token_schedules import bias_update_speed_at, mtp_loss_weight_at, parse_later_weight

SIGNALLED, WRITTEN = 0, 1  # places in a step's votes
MAX_SKIPPED_IN_A_ROW = 50  # dynamic loss scaling skips a few; this many in a row never recover


@dataclass
class TrainingRun:
    """What one run trains, with what, on what, and where it stands."""

    plan: RunPlan
    engine: Any
    data: TrainingData
    heldout: list[PreparedCorpus]
    state: TrainingState
    skipped_in_a_row: int = 0
    signals: StopSignals = field(default_factory=StopSignals)
    stopped_by: str | None = None  # the signal that ended the run before its last step

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
                batch = instruments.fetch(batches)
                result = self._take_step(batch)
                seconds = time.perf_counter() - begin
                ranks_line, growths = instruments.end_step(self.state.step, seconds)
                line = self._measure(batch, result, seconds) | ranks_line
                if writer:
                    writer.write(line)
                    for growth in growths:
                        writer.write_event("memory_growth", self.state.step, **asdict(growth))
                _show(bar, line)
                self._give_up_if_hopeless(line["loss_scale"])
                evaluated = self._due(self.plan.config.eval_steps)
                if evaluated:
                    evaluation = self._evaluate(writer)
                self.stopped_by = self._stop_asked_for(result)
                # after a skipped step the loss scale is in motion; a run that is told to stop saves all the same
                due = self._due(self.plan.config.save_steps) and not self.skipped_in_a_row
                if due or self.stopped_by:
                    self._save(evaluation if evaluated else None, writer)
                elif result.votes[WRITTEN] == self.plan.launch.world_size:
                    self.writer.finish()
                if self.stopped_by:
                    break
            self.writer.finish()
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
        micro_batches = [_to_device(micro, self.engine.device) for micro in batch.micro_batches]
        result = train_step(
            self.engine,
            micro_batches,
            self._bias_update_speed(),
            batch.source_ids,
            len(self.data.corpora),
            self._votes,
        )
        state.step += 1
        state.samples += global_batch_size
        state.tokens += result.label_tokens
        state.skipped_steps += not result.applied
        self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
        return result

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

    def _give_up_if_hopeless(self, loss_scale: float) -> None:
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingFault(
                f"step {self.state.step}: {self.skipped_in_a_row} steps in a row had gradients that are not finite "
                f"(loss scale {loss_scale:g}); the newest good checkpoint is the one before them"
            )

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
            rank=plan.launch.rank,
            world_size=plan.launch.world_size,
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
        best = evaluation is not None and evaluation.loss <= (state.best_eval_loss or evaluation.loss)
        if best and evaluation:
            state.best_eval_loss = evaluation.loss
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


def _to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def evaluate_heldout(engine: Any, plan: RunPlan, heldout: list[PreparedCorpus]) -> Evaluation | None:
    """Loss over the whole held-out part of all sources; None where nothing is held out."""
    heldout = [corpus for corpus in heldout if corpus.num_tokens > 1]
    if not heldout:
        return None
    share_batches = functools.partial(
        heldout_batches,
        seq_length=plan.seq_length,
        micro_batch_size=plan.resolved.micro_batch_size,
        rank=plan.launch.rank,
        world_size=plan.launch.world_size,
        document_mask=plan.config.document_mask,
    )
    batches = itertools.chain.from_iterable(map(share_batches, heldout))
    return evaluate(engine, batches, sum(corpus.num_bytes for corpus in heldout))
