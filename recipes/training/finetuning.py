"""One fine-tuning run: its model from trained weights, its data from conversations; the rest is every run's."""

import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.cluster.launch import Launch
from recipes.config.errors import UserError
from recipes.config.finetune_config import FinetuneConfig
from recipes.config.run_config import run_folder
from recipes.data.conversation_corpus import (
    LEARNED_BIT,
    ConversationSettings,
    open_conversations,
    prepare_conversations,
)
from recipes.data.conversation_data import ConversationData
from recipes.data.corpus import PreparedCorpus
from recipes.data.mixture import parse_data_spec, resolve_weights
from recipes.data.tokenizer import load_tokenizer
from recipes.training.adapters import add_adapters, with_adapters
from recipes.training.data_sources import PREPARED_FOLDER
from recipes.training.initial_weights import check_same_on_every_rank, copy_weights, draw_weights
from recipes.training.merged_adapters import has_adapters
from recipes.training.plan_run import RunPlan, choose_seq_length, resolve_run
from recipes.training.pretraining import carry_out, start_run
from recipes.training.sample import sample_tokens
from recipes.training.trained_model import TrainedWeights, open_weights


@dataclasses.dataclass(frozen=True)
class FinetunePlan:
    """A run, resolved and checked, and its data, whose size decides how many steps an epoch has."""

    run: RunPlan
    sources: list[tuple[PreparedCorpus, float]]  # and each one's part of the sequences
    data: ConversationData
    heldout: list[PreparedCorpus]


def plan_finetune(config: FinetuneConfig, launch: Launch) -> FinetunePlan:
    """Prepare the conversations, or find them prepared, and resolve the run; nothing else is started or written.

    Raises:
        UserError: with what is wrong.
    """
    _check_folder(config)
    weights = open_weights(str(config.init_from))
    model = with_adapters(config, _model_of(config, weights))
    seq_length = choose_seq_length(config, model)
    sources, heldout = _open_sources(config, model, weights)
    data = ConversationData(sources, seq_length, config.seed)
    tokens = None if config.max_steps else config.num_train_epochs * data.num_sequences * seq_length
    train_tokens = None if tokens is None else max(1, math.ceil(tokens))
    run = resolve_run(config, launch, model, max_steps=config.max_steps, train_tokens=train_tokens)
    data.check_global_batch_size(run.resolved.global_batch_size)
    if run.candidates and not has_adapters(model):
        if has_adapters(ModelConfig.from_file(run.candidates[0] / "config.json")):
            raise UserError(f"{run.candidates[0]}: holds adapters; go on with its --lora_rank, or begin another run")
    return FinetunePlan(run, sources, data, heldout)


def _check_folder(config: FinetuneConfig) -> None:
    """Raises UserError: the run's folder is one of pre-training, whose checkpoints would be gone on from."""
    folder = run_folder(config)
    record = folder / "run.json"
    if record.is_file() and "num_train_epochs" not in json.loads(record.read_text()).get("arguments", {}):
        raise UserError(f"--output_dir {folder}: holds another recipe's run; give this one a folder of its own")


def _model_of(config: FinetuneConfig, weights: TrainedWeights) -> ModelConfig:
    """The architecture of the weights, with what fine-tuning sets of it."""
    weight = weights.config.mtp_loss_weight if config.mtp_loss_weight is None else config.mtp_loss_weight
    return dataclasses.replace(weights.config, bias_update_speed=config.bias_update_speed, mtp_loss_weight=weight)


def _open_sources(
    config: FinetuneConfig, model: ModelConfig, weights: TrainedWeights
) -> tuple[list[tuple[PreparedCorpus, float]], list[PreparedCorpus]]:
    """(training corpus, its part of the sequences) for each source, and what to evaluate on."""
    tokenizer = config.tokenizer or weights.tokenizer_folder
    if tokenizer is None:
        raise UserError(f"--init_from {config.init_from}: holds no tokenizer.json; name the model's with --tokenizer")
    settings = ConversationSettings(str(tokenizer), config.chat_template, config.holdout_share, config.on_error)
    specs = [parse_data_spec(spec) for spec in config.data]
    folders = [prepare_conversations(source, PREPARED_FOLDER, settings) for source, _ in specs]
    corpora = [open_conversations(folder, "train", config.verify_data) for folder in folders]
    if config.eval_data:
        whole = dataclasses.replace(settings, holdout=0.0)
        eval_folders = [prepare_conversations(source, PREPARED_FOLDER, whole) for source in config.eval_data]
        heldout = [open_conversations(folder, "train", config.verify_data) for folder in eval_folders]
    else:
        heldout = [open_conversations(folder, "heldout", config.verify_data) for folder in folders]
    for corpus in [*corpora, *heldout]:
        corpus.check_vocab_size(model.vocab_size)
    sizes, given = [corpus.num_tokens for corpus in corpora], [weight for _, weight in specs]
    parts = resolve_weights(sizes, given, config.mixture_temperature)
    return list(zip(corpora, parts, strict=True)), heldout


def finetune(plan: FinetunePlan) -> int:
    """Train by the plan and say what came of it.

    Raises:
        UserError: found before the first step.
        TrainingFault: training could not go on.
    """
    begin = time.perf_counter()
    shown = next((corpus for corpus in plan.heldout if corpus.num_documents), plan.data.corpora[0])
    answer = functools.partial(sample_answer, corpus=shown)
    return carry_out(start_run(plan.run, plan.sources, plan.data, plan.heldout, _fill), answer, begin)


def _fill(model: DeepseekForCausalLM, plan: RunPlan, fresh: bool) -> None:
    """Give the model the weights it begins from; under adapters these are the frozen ones of a resumed run, too."""
    if not fresh and not has_adapters(plan.model):
        return  # all of them come from the checkpoint
    draw_weights(model, plan.config.seed)
    note = copy_weights(model, open_weights(str(plan.config.init_from)))
    if plan.launch.is_main:
        print(f"weights from {plan.config.init_from}{'; ' + note if note else ''}", flush=True)
    if has_adapters(plan.model):
        add_adapters(model, plan.config.seed)
    check_same_on_every_rank(model)


def sample_answer(engine: Any, tokenizer_folder: Path, corpus: PreparedCorpus) -> str:
    """The first conversation of a corpus to its first answer, and the model's likeliest answer; all ranks call it."""
    tokenizer = load_tokenizer(str(tokenizer_folder))
    context = engine.module.config.max_position_embeddings
    words = corpus.tokens[0 : min(int(corpus.document_ends[0]), context)]
    learned = (words & LEARNED_BIT) != 0
    prompt: list[int] = words[: int(learned.argmax())].astype(int).tolist() if learned.any() else []
    if not 0 < len(prompt) < context:
        return ""
    # With adapters the cache's shortcut would read kv_b_proj's weight without its adapter.
    cached = not has_adapters(engine.module.config)
    drawn = sample_tokens(engine, prompt, tokenizer.eos_token_id, temperature=0.0, use_cache=cached)
    return str(tokenizer.decode([*prompt, *drawn], skip_special_tokens=True))
