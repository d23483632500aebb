"""What a checkpoint holds, how much of it there is, and whether it is well."""

from pathlib import Path
from typing import Any

import torch

from model.config import ConfigError, ModelConfig
from model.flops import count_parameters
from recipes.training.checkpoint_files import (
    LATEST,
    UNIVERSAL_SUFFIX,
    CheckpointError,
    best_name,
    read_manifest,
    read_state,
    verify_checksums,
    verify_sizes,
)
from recipes.training.checkpoint_weights import load_model_state

KINDS = (  # of DeepSpeed's file names
    ("optim_states.pt", "optimizer and master weights"),
    ("model_states.pt", "model weights"),
    ("rng_", "random-number states"),
    ("buffers.pt", "buffers (balancing biases)"),
)


def describe_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """State, sizes and completeness, without reading the large files."""
    description: dict[str, Any] = {"path": str(checkpoint), "whole": True, "faults": []}
    try:
        description |= _contents(checkpoint)
        verify_sizes(checkpoint)
    except (CheckpointError, ConfigError) as error:
        description |= {"whole": False, "faults": [str(error)]}
    pointer = checkpoint.parent / LATEST
    description["latest"] = pointer.is_file() and pointer.read_text().strip() == checkpoint.name
    description["best"] = best_name(checkpoint.parent) == checkpoint.name
    description["converted"] = checkpoint.with_name(checkpoint.name + UNIVERSAL_SUFFIX).is_dir()
    return description


def _contents(checkpoint: Path) -> dict[str, Any]:
    state = read_state(checkpoint)
    sizes: dict[str, int] = {}
    manifest = read_manifest(checkpoint)
    for name, entry in manifest.items():
        kind = next((kind for part, kind in KINDS if part in name), "configuration and tokenizer")
        sizes[kind] = sizes.get(kind, 0) + entry["bytes"]
    counts = count_parameters(ModelConfig.from_file(checkpoint / "config.json"))
    return {
        "step": state.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "skipped_steps": state.skipped_steps,
        "best_eval_loss": state.best_eval_loss,
        "world_size": state.world_size,
        "zero_stage": state.zero_stage,
        "dtype": state.dtype,
        "autoep_size": state.autoep_size,
        "autotp_size": state.autotp_size,
        "parameters": counts.total + counts.mtp,
        "files": len(manifest),
        "bytes": sum(sizes.values()),
        "bytes_by_kind": sizes,
        "settings": state.settings,
    }


def faults_of(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, after reading all of it: files, checksums, values that are not finite."""
    try:
        verify_sizes(checkpoint)
        verify_checksums(checkpoint)
        read_state(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    _, weights, _ = load_model_state(checkpoint)
    bad = [name for name in weights if not bool(torch.isfinite(weights[name]).all())]
    return [f"{len(bad)} tensors hold NaN or infinity, the first is {bad[0]}"] if bad else []


def describe_lines(one: dict[str, Any]) -> list[str]:
    """One checkpoint, a line for each thing."""
    if "step" not in one:
        return [f"{one['path']}: {'; '.join(one['faults'])}"]
    marks = [mark for mark in ("latest", "best", "converted") if one[mark]]
    sharing = f", AutoEP {one['autoep_size']}" if one["autoep_size"] else ""
    sharing += f", AutoTP {one['autotp_size']}" if one["autotp_size"] > 1 else ""
    return [
        f"{one['path']}{' (' + ', '.join(marks) + ')' if marks else ''}",
        f"  step          {one['step']:,}; {one['tokens']:,} tokens, {one['samples']:,} sequences, "
        f"{one['skipped_steps']} steps skipped",
        f"  saved by      {one['world_size']} ranks, ZeRO {one['zero_stage']}, {one['dtype']}{sharing}",
        f"  parameters    {one['parameters']:,}",
        *([f"  best so far   evaluation loss {one['best_eval_loss']:.4f}"] if one["best_eval_loss"] else []),
        f"  size          {one['bytes']:,} bytes in {one['files']} files",
        *(f"                {count:>16,}  {kind}" for kind, count in sorted(one["bytes_by_kind"].items())),
        f"  files         {'all there in full' if one['whole'] else '; '.join(one['faults'])}",
        *(f"  run           {name}: {value}" for name, value in one["settings"].items() if value is not None),
    ]


def table_lines(found: list[dict[str, Any]]) -> list[str]:
    """Several checkpoints, a line each."""
    lines = [f"{'step':>10}  {'tokens':>16}  {'bytes':>16}  {'saved by':<24}  state"]
    for one in found:
        if "step" not in one:
            lines.append(f"{Path(one['path']).name}: {'; '.join(one['faults'])}")
            continue
        marks = [mark for mark in ("latest", "best", "converted") if one[mark]]
        health = ["whole" if one["whole"] else "; ".join(one["faults"])]
        by = f"{one['world_size']} ranks, ZeRO {one['zero_stage']}, {one['dtype']}"
        lines.append(
            f"{one['step']:>10,}  {one['tokens']:>16,}  {one['bytes']:>16,}  {by:<24}  {', '.join(health + marks)}"
        )
    return lines
