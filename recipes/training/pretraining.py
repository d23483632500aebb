"""One pre-training run from its plan to its report."""

import contextlib
import json
import random
import time
from typing import Any

import numpy
import torch

from model.transformer import DeepseekForCausalLM
from recipes.cluster.launch import set_cpu_threads, start_process_group
from recipes.config.errors import EXIT_SUCCESS, UserError
from recipes.data.loader import TrainingData
from recipes.training.checkpoint import TrainingState, load_checkpoint
from recipes.training.data_sources import open_sources
from recipes.training.engine import build_engine, build_model
from recipes.training.evaluation import Evaluation
from recipes.training.initial_weights import check_same_on_every_rank, copy_weights, draw_weights
from recipes.training.loop import TrainingRun
from recipes.training.plan_run import RunPlan
from recipes.training.report import write_report
from recipes.training.resume import newest_verified, prepare_run_folder
from recipes.training.sample import sample_text
from recipes.training.summary import result_lines, write_run_files
from recipes.training.trained_model import open_weights


def pretrain(plan: RunPlan) -> int:
    """Prepare the data, start, resume or begin, train, and say what came of it.

    Raises:
        UserError: found before the first step.
        TrainingFault: training could not go on.
    """
    begin = time.perf_counter()
    set_cpu_threads(plan.launch)
    # Before the process group: tokenizing may outlast its timeout.
    sources, heldout = open_sources(plan.config, plan.model)
    start_process_group(plan.launch, plan.resolved.config)
    candidates = plan.candidates
    newest = newest_verified(
        candidates, plan.config.resume != "auto", plan.launch.rank, plan.launch.world_size, _from_all_ranks
    )
    if plan.launch.is_main:
        prepare_run_folder(plan.folder, plan.config.resume, plan.config.overwrite)
        write_run_files(plan)
    torch.distributed.barrier()
    seed_everything(plan.config.seed + plan.launch.rank)
    model = build_model(plan.model, plan.resolved.config)
    _fill(model, plan, fresh=newest is None)
    engine = build_engine(model, plan.resolved.config, plan.schedule.multiplier)
    engine.module.set_gradient_checkpointing(plan.config.gradient_checkpointing or plan.resolved.gradient_checkpointing)
    state = TrainingState(**plan.layout)
    if newest:
        state = load_checkpoint(engine, newest)
        if plan.launch.is_main:
            print(f"resumed at step {state.step} from {newest}", flush=True)
    data = TrainingData(
        sources,
        plan.seq_length,
        plan.config.seed,
        document_mask=plan.config.document_mask,
        packing=plan.config.packing,
        fim_rate=plan.config.fim_rate,
    )
    run = TrainingRun(plan, engine, data, heldout, state)
    evaluation = run.train()
    sample = sample_text(engine, run.tokenizer_folder)
    if plan.launch.is_main:
        _conclude(plan, evaluation, sample, time.perf_counter() - begin)
    return EXIT_SUCCESS


def _fill(model: DeepseekForCausalLM, plan: RunPlan, fresh: bool) -> None:
    """Give the model its first values, the same on every rank; a resumed run's are replaced by the checkpoint's."""
    draw_weights(model, plan.config.seed)
    if fresh and plan.config.init_from:
        note = copy_weights(model, open_weights(plan.config.init_from))
        if plan.launch.is_main:
            print(f"weights from {plan.config.init_from}{'; ' + note if note else ''}", flush=True)
    check_same_on_every_rank(model)


def seed_everything(seed: int) -> None:
    """Seed what draws at random outside our own seeded generators (libraries, dropout): differently on each rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _from_all_ranks(text: str) -> list[str]:
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def _conclude(plan: RunPlan, evaluation: Evaluation | None, sample: str | None, seconds: float) -> None:
    """Write the report and print where everything is."""
    with contextlib.suppress(UserError):  # nothing was logged, so there is nothing to report
        write_report([plan.folder], plan.folder / "report.html")
    print("\n".join(result_lines(plan, evaluation, sample, seconds)), flush=True)
    if plan.config.json:
        result = {"output_dir": str(plan.folder), "steps": plan.resolved.max_steps, "seconds": seconds}
        if evaluation:
            result |= {"eval_loss": evaluation.loss, "eval_bits_per_byte": evaluation.bits_per_byte}
        print(json.dumps(result))
