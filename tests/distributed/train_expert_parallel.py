"""Train 20 steps under several layouts of ranks, ZeRO and model: `train_expert_parallel.py MODEL FOLDER CASES_JSON`.

A case is a list of `--set` settings on ds_configs/cpu.json, and of words: a checkpointing policy; "softmax" for V2's
routing; "documents" for attention within them; "save". All see the same global batches, some rows
padded. FOLDER gets steps.json, and what was saved.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

from model.config import ModelConfig
from model.losses import IGNORE_INDEX
from model.moe import iter_routers
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.config.ds_check import ranks_per_sequence
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.training.engine import build_engine, build_model
from recipes.training.evaluation import evaluate
from recipes.training.expert_parallel import own_experts
from recipes.training.initial_weights import check_same_on_every_rank, draw_weights
from recipes.training.loss_scale import UpdateControl
from recipes.training.schedule import build_schedule
from recipes.training.step import train_step
from tests.distributed.emulated_fp16 import allow_fp16

STEPS, BATCH, LENGTH, SPEED = 20, 8, 24, 0.002
EVALUATED = 7  # the step before which a held-out batch is evaluated, which must leave no trace


def resolve(settings, model, ranks):
    small = ["optimizer.params.lr=2e-3", "scheduler.type=constant", "scheduler.params={}", "tensorboard.enabled=false"]
    small += ["train_micro_batch_size_per_gpu=1", "zero_optimization.reduce_bucket_size=20000"]
    facts = RunFacts(
        world_size=ranks,
        device_type="cpu",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=model,
        seq_length=LENGTH,
        global_batch_size=BATCH,
        max_steps=STEPS,
        lr_scaling="none",
        output_dir=Path("unused"),
    )
    config = apply_overrides(load_ds_config(DS_CONFIGS / "cpu.json"), small + settings)
    return resolve_ds_config(config, source=" ".join(settings), facts=facts)


def global_batch(step, vocab_size):
    """(B, S + 1) tokens in which some experts are preferred, and (B, S) of which are valid; row 3 is half padding."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, LENGTH + 1, generator=generator) ** 2 * vocab_size).long()
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[3, LENGTH // 2 :] = False
    return ids, valid


def micro_batches(step, vocab_size, micro_batch, ranks, rank, documents=False):
    ids, valid = global_batch(step, vocab_size)
    positions = torch.arange(LENGTH)
    starts = torch.tensor([0, 7, 17]) if documents else torch.tensor([0])  # none at a cut of the sequence in halves
    document_ids = (positions.unsqueeze(1) >= starts).sum(1) - 1
    more = {"position_ids": (positions - starts[document_ids]).expand(micro_batch, -1)}
    more |= {"document_ids": document_ids.expand(micro_batch, -1)} if documents else {}
    for first in range(rank * micro_batch, BATCH, ranks * micro_batch):
        rows = slice(first, first + micro_batch)
        labels = ids[rows, 1:].masked_fill(~valid[rows], IGNORE_INDEX)
        yield {"input_ids": ids[rows, :-1], "labels": labels, "valid_tokens": valid[rows], **more}


def model_config(path, words):
    config = ModelConfig.from_file(path)
    if "softmax" not in words:
        return config
    routing = {"scoring_func": "softmax", "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return dataclasses.replace(config, **routing, routed_scaling_factor=2.0)


def train(name, settings, config, ranks, rank, folder):
    """Of each step what train_step says and the biases after it."""
    words = [word for word in settings if "=" not in word]
    resolved = resolve([word for word in settings if "=" in word], config, ranks)
    model = build_model(config, resolved.config)
    sharing = ranks_per_sequence(resolved.config)
    data_ranks, data_rank = ranks // sharing, rank // sharing
    experts = own_experts(config, resolved.config, rank)
    draw_weights(model, 1, experts)
    check_same_on_every_rank(model, experts)
    engine = build_engine(model, resolved.config, build_schedule(resolved.scheduler, STEPS).multiplier)
    for policy in {"full", "selective"} & set(words):
        engine.module.set_gradient_checkpointing(policy)
    of_case = {"documents": "documents" in words}
    control, steps = UpdateControl(engine), []
    for step in range(STEPS):
        if step == EVALUATED:
            evaluate(engine, micro_batches(1000, config.vocab_size, 1, data_ranks, data_rank, **of_case), text_bytes=1)
        batches = list(
            micro_batches(step, config.vocab_size, resolved.micro_batch_size, data_ranks, data_rank, **of_case)
        )
        sources = torch.zeros(len(batches), resolved.micro_batch_size, dtype=torch.int64)
        result = train_step(engine, control, batches, SPEED, sources, num_sources=1)
        biases = {
            name: router.e_score_correction_bias
            for name, router in iter_routers(engine.module)
            if router.e_score_correction_bias is not None
        }
        assert all(bias.dtype == torch.float32 for bias in biases.values())
        assert all(router.tokens_per_expert.sum() == 0 for _, router in iter_routers(engine.module))
        steps.append(dataclasses.asdict(result) | {"biases": {name: bias.tolist() for name, bias in biases.items()}})
    if "save" in words:
        save(engine, folder, name)
    engine.destroy()
    return steps


def save(engine, folder, name):
    """The checkpoint as DeepSpeed writes it, beside it the buffers; without AutoEP the plain weights."""
    if "expert_parallel" not in engine.config:
        torch.save(engine.module.state_dict(), folder / f"{name}.pt")
        return
    engine.save_checkpoint(str(folder), tag=name, save_latest=False)
    if torch.distributed.get_rank() == 0:
        torch.save(dict(engine.module.named_buffers()), folder / name / "buffers.pt")


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    launch = read_launch()
    model_file, folder, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    start_process_group(launch, {})
    report = {
        name: train(name, settings, model_config(model_file, settings), launch.world_size, launch.rank, folder)
        for name, settings in cases.items()
    }
    if launch.is_main:
        (folder / "steps.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    stop_process_group()
    os._exit(0)  # the report is written; gloo's threads have been seen to abort an interpreter's own shutdown
