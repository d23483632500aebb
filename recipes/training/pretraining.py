"""One run from its plan to its report: the part that all recipes share, and pre-training."""

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch

from model.transformer import DeepseekForCausalLM
from recipes.cluster.launch import set_cpu_threads, start_process_group
from recipes.config.errors import EXIT_SUCCESS, UserError
from recipes.config.run_config import PretrainConfig
from recipes.data.corpus import PreparedCorpus
from recipes.data.loader import TrainingData
from recipes.training.checkpoint import load_checkpoint
from recipes.training.checkpoint_files import TrainingState, checkpoints_folder, read_state
from recipes.training.data_sources import open_sources
from recipes.training.determinism import make_deterministic
from recipes.training.engine import build_engine, build_model, compile_layers
from recipes.training.evaluation import Evaluation
from recipes.training.expert_parallel import own_experts
from recipes.training.finished import RunIsFinished, clear_finished, write_finished
from recipes.training.initial_weights import check_same_on_every_rank, copy_weights, draw_weights
from recipes.training.loop import TrainingRun
from recipes.training.moving_average import MovingAverage
from recipes.training.plan_run import RunPlan
from recipes.training.report import write_report
from recipes.training.resume import layout_changes, newest_verified, prepare_run_folder
from recipes.training.run_log import PRINTED, faults_logged, logger, start_run_log
from recipes.training.run_settings import changed_settings, settings_of
from recipes.training.sample import sample_text
from recipes.training.stop_signals import EXIT_STOPPED
from recipes.training.summary import result_lines, resume_command, write_run_files
from recipes.training.trained_model import open_weights
from recipes.training.universal import convert, load_universal, universal_folder, wait_until_converted


def pretrain(plan: RunPlan) -> int:
    """Prepare the data, start, resume or begin, train, and say what came of it.

    Raises:
        UserError: found before the first step.
        TrainingFault: training could not go on.
    """
    begin = time.perf_counter()
    return carry_out(open_run(plan), sample_text, begin)


def open_run(plan: RunPlan) -> TrainingRun:
    """A pre-training run where it stands: data open, engine built, its checkpoint loaded."""
    assert isinstance(plan.config, PretrainConfig)
    # Before the process group: tokenizing may outlast its timeout.
    sources, heldout = open_sources(plan.config, plan.model)
    data = TrainingData(
        sources,
        plan.seq_length,
        plan.config.seed,
        document_mask=plan.config.document_mask,
        packing=plan.config.packing,
        fim_rate=plan.config.fim_rate,
    )
    return start_run(plan, sources, data, heldout, _fill)


def start_run(
    plan: RunPlan,
    sources: list[tuple[PreparedCorpus, float]],
    data: TrainingData,
    heldout: list[PreparedCorpus],
    fill: Callable[[DeepseekForCausalLM, RunPlan, bool], None],
) -> TrainingRun:
    """Join the process group, build the engine, and load the checkpoint to go on from, if there is one.

    Args:
        sources: (training corpus, its part of the tokens) for each source of `data`.
        fill: (model, plan, fresh) gives the model its first values, the same on every rank.
    Raises:
        RunIsFinished: on every rank; there is nothing left to train.
    """
    set_cpu_threads(plan.launch)
    if plan.config.deterministic:
        make_deterministic(plan.device_type, plan.launch.is_main)
    if plan.launch.is_main:
        clear_finished(plan.folder)
    plan.nccl.apply()
    start_process_group(plan.launch, plan.resolved.config, timedelta(seconds=plan.config.dist_timeout))
    plan = replace(plan, candidates=_from_rank_0(plan.candidates))
    saved = plan.saved_state()
    if saved and saved.step >= plan.resolved.max_steps:
        raise RunIsFinished(saved.step)
    newest = newest_verified(
        plan.candidates, plan.config.resume != "auto", plan.launch.rank, plan.launch.world_size, _from_all_ranks
    )
    if plan.launch.is_main:
        prepare_run_folder(plan.folder, plan.config.resume)
        write_run_files(plan)
    torch.distributed.barrier()
    start_run_log(plan.folder, plan.launch.rank, plan.config.log_level)
    seed_everything(plan.config.seed + plan.launch.rank)
    model = build_model(plan.model, plan.resolved.config)
    fill(model, plan, newest is None)
    engine = build_engine(model, plan.resolved.config, plan.schedule.multiplier)
    engine.module.set_gradient_checkpointing(plan.config.gradient_checkpointing or plan.resolved.gradient_checkpointing)
    if plan.config.torch_compile:
        compile_layers(engine.module)
    settings = settings_of(plan, sources)
    state = _resume(engine, plan, newest, settings) if newest else TrainingState()
    state = replace(state, settings=settings, **plan.layout)  # from here on this run's
    run = TrainingRun(plan, engine, data, heldout, state)
    if plan.config.ema_decay:
        run.moving_average = MovingAverage(
            engine, decay=plan.config.ema_decay, every=plan.config.ema_steps, run=plan.folder, step=state.step
        )
    return run


def carry_out(run: TrainingRun, sample: Callable[[Any, Path], str], begin: float) -> int:
    """Train to the end, or until a signal, and say what came of it.

    Args:
        sample: (engine, the tokenizer's folder) -> a text by the trained model; all ranks call it.
        begin: time.perf_counter() when the run's work began [s].
    """
    plan = run.plan
    with faults_logged():
        evaluation = run.train()
    if run.stopped_by:
        run.signals.ignore()
        logger.warning("%s: saved at step %d", run.stopped_by, run.state.step, extra=PRINTED)
        if plan.launch.is_main:
            go_on = resume_command(plan, profile=None)  # the steps to profile may be past
            print(f"{run.stopped_by}: saved at step {run.state.step}; to go on: {go_on}", flush=True)
        return EXIT_STOPPED
    logger.info("finished %d steps", run.state.step, extra=PRINTED)
    text = sample(run.engine, run.tokenizer_folder)
    if plan.launch.is_main:
        _conclude(plan, evaluation, text, time.perf_counter() - begin)
    return EXIT_SUCCESS


def _resume(engine: Any, plan: RunPlan, checkpoint: Path, settings: dict[str, Any]) -> TrainingState:
    """Load a verified checkpoint, converted where this run's layout differs from its own, and say what was done."""
    changes = layout_changes(read_state(checkpoint), plan.layout)
    if changes:
        universal = universal_folder(checkpoint, checkpoints_folder(plan.folder))
        if plan.launch.is_main:
            convert(checkpoint, universal, plan.autoep_size > 0)
        wait_until_converted(checkpoint, universal, plan.autoep_size > 0)
        state = load_universal(engine, checkpoint, universal, plan.dtype)
    else:
        state = load_checkpoint(engine, checkpoint)
    if plan.launch.is_main:
        end = plan.resolved.max_steps
        how = f"converted: {', '.join(changes)}" if changes else "as it was saved"
        print(f"resumed at step {state.step} of {end} from {checkpoint} ({how})", flush=True)
        if "fp16" in (state.dtype, plan.dtype) and state.dtype != plan.dtype:
            print(f"  the loss scale begins anew: the checkpoint is {state.dtype}, this run {plan.dtype}", flush=True)
        for line in changed_settings(state.settings, settings):
            print(f"  changed, this run's takes effect: {line}", flush=True)
    logger.info("resumed at step %d from %s", state.step, checkpoint, extra=PRINTED)
    return state


def _fill(model: DeepseekForCausalLM, plan: RunPlan, fresh: bool) -> None:
    """Give the model its first values, the same on every rank; a resumed run's all come from its checkpoint."""
    if not fresh:
        return
    experts = own_experts(plan.model, plan.resolved.config, plan.launch.rank)
    draw_weights(model, plan.config.seed, experts)
    if plan.config.init_from:
        note = copy_weights(model, open_weights(plan.config.init_from), experts)
        if plan.launch.is_main:
            print(f"weights from {plan.config.init_from}{'; ' + note if note else ''}", flush=True)
    check_same_on_every_rank(model, experts)


def seed_everything(seed: int) -> None:
    """Seed what draws at random outside our own seeded generators (libraries, dropout): differently on each rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _from_rank_0(value: Any) -> Any:
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def _from_all_ranks(text: str) -> list[str]:
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def _conclude(plan: RunPlan, evaluation: Evaluation | None, sample: str | None, seconds: float) -> None:
    """Write the report and print where everything is."""
    with contextlib.suppress(UserError):  # nothing was logged, so there is nothing to report
        write_report([plan.folder], plan.folder / "report.html")
    print("\n".join(result_lines(plan, evaluation, sample, seconds)), flush=True)
    write_finished(plan.folder, plan.resolved.max_steps)
    if plan.config.json:
        result = {"output_dir": str(plan.folder), "steps": plan.resolved.max_steps, "seconds": seconds}
        if evaluation:
            result |= {"eval_loss": evaluation.loss, "eval_bits_per_byte": evaluation.bits_per_byte}
        print(json.dumps(result))
