"""Prepare a corpus for training: text from files, folders or the hub becomes token ids on disk.

python recipes/prepare_data.py --input data.jsonl.zst --tokenizer deepseek-ai/DeepSeek-V3 --output prepared/data
python recipes/prepare_data.py --input stdlib --train_tokenizer 4096 --output prepared/stdlib
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import UserError, run_command
from recipes.data.corpus import SPLITS, Manifest, PreparedCorpus
from recipes.data.prepare import prepare
from recipes.data.reading import ON_ERROR_CHOICES
from recipes.data.tokenizer import padded_vocabulary_size


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Tokenize text once into a folder that every run can train from, at any sequence length. A second "
        "call with the same inputs and settings verifies the folder and keeps it; an interrupted one goes on.",
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="SPEC",
        help="files (.jsonl, .csv, .tsv, .txt, each also .gz or .zst; .parquet), folders of such files or of code, "
        "a folder saved by `datasets`, Megatron's .bin/.idx pair, a hub id (id or id:configuration, streamed), or "
        "stdlib for the Python standard library's sources on this machine",
    )
    add("--output", required=True, type=Path, help="the folder to make")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="a tokenizer's folder, its tokenizer.json, or a hub id")
    which.add_argument(
        "--train_tokenizer", type=int, metavar="VOCAB", help="train a byte-level BPE of VOCAB ids on the text"
    )
    add("--vocab_size", type=int, help="the model's vocab_size: an id at or above it is an error (with --tokenizer)")
    add(
        "--vocab_multiple",
        type=int,
        default=128,
        help="the multiple to which the suggested vocab_size of the model is rounded up; GPUs want 128 (default: 128)",
    )
    add("--text_key", default="text", help="the key or column that holds the text (default: text)")
    add("--holdout", type=float, default=0.1, help="part of the documents to hold out for evaluation (default: 0.1)")
    add(
        "--on_error",
        choices=ON_ERROR_CHOICES,
        default="stop",
        help="a bad record: stop and name its file and line, replace bytes that are not UTF-8, or skip it; the last "
        "two are counted (default: stop)",
    )
    add("--fim", action="store_true", help="add tokens for fill-in-the-middle to a tokenizer that has none")
    add("--num_proc", type=int, help="tokenizing processes (default: one for each core)")
    add(
        "--overwrite",
        action="store_true",
        help="replace an output folder that was prepared from other inputs or settings",
    )
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    for flag in ("num_proc", "vocab_multiple"):
        if getattr(arguments, flag) is not None and getattr(arguments, flag) < 1:
            raise UserError(f"--{flag} {getattr(arguments, flag)}: must be at least 1")
    if arguments.train_tokenizer is not None and arguments.vocab_size is not None:
        raise UserError("--vocab_size: goes with --tokenizer; --train_tokenizer VOCAB says the size already")
    folder = prepare(
        arguments.input,
        arguments.output,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size if arguments.tokenizer else arguments.train_tokenizer,
        holdout=arguments.holdout,
        text_key=arguments.text_key,
        on_error=arguments.on_error,
        fim=arguments.fim,
        num_proc=arguments.num_proc,
        overwrite=arguments.overwrite,
    )
    manifest = Manifest.read(folder)
    for split in SPLITS:
        PreparedCorpus.open(folder, split, verify="full")
    padded = padded_vocabulary_size(manifest.vocab_size, arguments.vocab_multiple)
    if arguments.json:
        result = {
            "folder": str(folder),
            **{key: value for key, value in asdict(manifest).items() if key not in ("settings", "splits")},
            "padded_vocab_size": padded,
            **{
                split: {
                    name: getattr(manifest.splits[split], name) for name in ("num_documents", "num_tokens", "num_bytes")
                }
                for split in SPLITS
            },
        }
        print(json.dumps(result))
        return 0
    for split in SPLITS:
        part = manifest.splits[split]
        print(f"{split}: {part.num_documents} documents, {part.num_tokens} tokens, {part.num_bytes} bytes of text")
    print(
        f"vocabulary: {manifest.vocab_size} ids; vocab_size for a model: {padded} "
        f"(a multiple of {arguments.vocab_multiple})"
    )
    print(f"train on it with: deepspeed recipes/pretrain.py --data {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
