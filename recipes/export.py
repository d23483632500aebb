"""Export a trained model to a Hugging Face folder.

python recipes/export.py runs/tiny exported/tiny
python recipes/export.py runs/v3/checkpoints/step_00001000 exported/v3 --dtype bfloat16 --mtp keep
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import UserError, run_command

DTYPES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="export.py",
        description="Write a folder that transformers' AutoModelForCausalLM.from_pretrained loads: config.json, "
        "safetensors shards, generation config and tokenizer. Weights are streamed, a shard at a time.",
    )
    add = parser.add_argument
    add("checkpoint", help="a run's folder (its newest checkpoint), a checkpoint's folder, or a Hugging Face folder")
    add("output", type=Path, help="the folder to make; it must not exist, or be empty")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights; router weights and balancing biases stay float32 in any case (default: float32, the "
        "training's master weights)",
    )
    add(
        "--mtp",
        choices=("keep", "drop"),
        default="drop",
        help="keep writes the multi-token prediction layers at index num_hidden_layers + k, which transformers reports "
        "as unexpected unless the model has 61 layers; drop leaves them out and says so in config.json (default: drop)",
    )
    add("--ema", action="store_true", help="export the run's moving average (it was trained with --ema_decay)")
    add("--average_last", type=int, help="export the average of the run's so many newest checkpoints")
    add(
        "--average_decay",
        type=float,
        help="weigh each of them by this to the power of the steps before the newest; default: all alike",
    )
    add("--max_shard_bytes", type=int, default=2 << 30, help="largest size of a file (default: 2 GiB)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Write the folder under another name, then give it its own, so that it is whole or not there."""
    arguments = build_parser().parse_args(argv)
    output: Path = arguments.output.expanduser()
    if arguments.max_shard_bytes < 1:
        raise UserError(f"--max_shard_bytes {arguments.max_shard_bytes}: must be at least 1")
    if arguments.ema and arguments.average_last is not None:
        raise UserError("--ema with --average_last: two kinds of average; give one")
    if arguments.average_decay is not None and arguments.average_last is None:
        raise UserError("--average_decay: there is no average without --average_last; give it too")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: is there already and not empty; give another folder, or remove it")
    aside = output.with_name(output.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        result = _export(arguments, aside)
        if output.exists():
            output.rmdir()
        aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if arguments.json:
        print(json.dumps({"output": str(output)} | result))
    else:
        print(f"exported to {output}: {result['files']} weight file(s), {result['bytes']:,} bytes, {arguments.dtype}")
        print(f"load it with AutoModelForCausalLM.from_pretrained({str(output)!r})")
    return 0


def _export(arguments: argparse.Namespace, folder: Path) -> dict[str, int | str]:
    import torch

    from model.hf_weights import WeightsError, save_hf_weights
    from recipes.training.moving_average import open_moving_average
    from recipes.training.trained_model import open_weights, without_mtp
    from recipes.training.weight_averaging import open_average

    if arguments.ema:
        weights = open_moving_average(arguments.checkpoint)
    elif arguments.average_last is not None:
        weights = open_average(arguments.checkpoint, arguments.average_last, arguments.average_decay)
    else:
        weights = open_weights(arguments.checkpoint)
    config = weights.config if arguments.mtp == "keep" else without_mtp(weights.config)
    folder.mkdir(parents=True)
    tokens = _copy_tokenizer(weights.tokenizer_folder, folder)
    config = dataclasses.replace(config, **tokens)
    values = config.to_dict() | {"dtype": arguments.dtype}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True} | tokens, indent=2) + "\n", encoding="utf-8"
    )
    try:
        source = weights.source(config)
        dtype: torch.dtype = getattr(torch, arguments.dtype)
        save_hf_weights(source, config, folder, dtype=dtype, max_shard_bytes=arguments.max_shard_bytes)
    except WeightsError as error:
        raise UserError(*error.faults) from None
    files = list(folder.glob("*.safetensors"))
    return {
        "dtype": arguments.dtype,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
        "files": len(files),
        "bytes": sum(os.path.getsize(file) for file in files),
    }


def _copy_tokenizer(tokenizer_folder: Path | None, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files; return the ids of its special tokens, by the config's names for them."""
    if tokenizer_folder is None:
        return {}
    from recipes.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.save_pretrained(str(folder))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}


if __name__ == "__main__":
    sys.exit(run_command(main))
