"""Evaluate a trained model: loss and bits per byte over text or conversations, and lm-eval's tasks.

python recipes/evaluate.py runs/tiny --data runs/data/mine
torchrun --nproc_per_node 2 recipes/evaluate.py exported/tiny --data book.txt --tasks arc_easy --json
"""

import argparse
import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import UserError, run_rank

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch

DTYPES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="Held-out loss and lm-eval's tasks. Under torchrun or deepspeed the ranks share the work, and the "
        "result is the same on any number of them.",
    )
    add = parser.add_argument
    add("checkpoint", help="a run's folder (its newest checkpoint), a checkpoint's folder, or a Hugging Face folder")
    add("--ema", action="store_true", help="the run's moving average (it was trained with --ema_decay)")
    add("--data", nargs="+", default=[], help="prepared folders, or files or folders of text, read whole")
    add("--split", choices=("heldout", "train"), default="heldout", help="of prepared folders (default: heldout)")
    add("--conversations", action="store_true", help="the files of --data hold conversations: loss on the answers")
    add("--text_key", default="text", help="key or column of the text in jsonl, csv and parquet (default: text)")
    add("--seq_length", type=int, help="tokens per sequence; default: the model's longest, at most 4096")
    add("--document_mask", action="store_true", help="keep attention inside a document")
    add("--tasks", nargs="+", default=[], help="lm-eval's tasks, by name; needs the package lm_eval")
    add("--include_path", help="a folder with further task files")
    add("--num_fewshot", type=int, help="examples before each question; default: as the task says")
    add("--limit", type=float, help="only the first so many documents of each task, or such a part of them")
    add("--chat", action="store_true", help="put the tasks' questions through the tokenizer's chat template")
    add("--batch_size", type=int, default=8, help="sequences at once (default: 8)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--device_map", choices=("auto",), help="spread a model that is bigger than one GPU over all of them (1 rank)")
    add("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on cuda, float32 on a cpu)")
    add("--output", type=Path, help="also write the result as JSON into this file")
    add("--json", action="store_true", help="print the result as JSON")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher's
    return parser


def main(argv: list[str] | None = None) -> int:
    """Load, evaluate, and let the first rank print."""
    arguments = build_parser().parse_args(argv)
    _check(arguments)
    from recipes.cluster.guard import guarded
    from recipes.cluster.launch import quiet_deepspeed, read_launch

    quiet_deepspeed()
    launch = read_launch()
    with guarded(launch):  # a mistake that one rank alone finds must end the others, too
        _evaluate(arguments, launch)
    return 0


def _evaluate(arguments: argparse.Namespace, launch: "Launch") -> None:
    from recipes.cluster.launch import start_process_group, stop_process_group
    from recipes.training.moving_average import open_moving_average
    from recipes.training.trained_model import open_weights

    if arguments.device_map and launch.world_size > 1:
        raise UserError(f"--device_map auto: one process drives all GPUs; {launch.world_size} ranks were started")
    weights = open_moving_average(arguments.checkpoint) if arguments.ema else open_weights(arguments.checkpoint)
    if weights.tokenizer_folder is None:
        raise UserError(f"{arguments.checkpoint}: holds no tokenizer.json; copy the model's tokenizer into it")
    # Before the process group: tokenizing may outlast its timeout.
    corpora = _open_data(arguments, weights.tokenizer_folder)
    if launch.world_size > 1:
        start_process_group(launch, {})
    model, device = _load(arguments, weights, launch.local_rank)
    share = (launch.rank, launch.world_size)
    result: dict[str, Any] = {"checkpoint": arguments.checkpoint}
    if arguments.data:
        result["data"] = _losses(arguments, model, corpora, device, share)
    if arguments.tasks:
        result["tasks"] = _tasks(arguments, model, weights.tokenizer_folder, device, share)
    if launch.is_main:
        _report(arguments, result)
    stop_process_group()


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError with every flag that is out of range or lacks another."""
    faults = []
    if not arguments.data and not arguments.tasks:
        faults.append("nothing to do: give --data, --tasks or both")
    for name in ("seq_length", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            faults.append(f"--{name} {value}: must be at least 1")
    given = {"include_path": arguments.include_path, "num_fewshot": arguments.num_fewshot, "limit": arguments.limit}
    for name, value in (given | {"chat": arguments.chat or None}).items():
        if value is not None and not arguments.tasks:
            faults.append(f"--{name}: is for --tasks; there are none")
    if arguments.tasks and find_spec("lm_eval") is None:
        faults.append("--tasks: needs the package lm_eval; run `pip install lm_eval`")
    if faults:
        raise UserError(*faults)


def _open_data(arguments: argparse.Namespace, tokenizer_folder: Path) -> list[Any]:
    if not arguments.data:
        return []
    from recipes.training.heldout_loss import open_evaluation_data

    return open_evaluation_data(
        arguments.data,
        tokenizer_folder,
        split=arguments.split,
        conversations=arguments.conversations,
        text_key=arguments.text_key,
    )


def _load(arguments: argparse.Namespace, weights: Any, local_rank: int) -> tuple[Any, Any]:
    """The model, whole on this rank's device or spread over all, and the device that its inputs go to."""
    import torch

    from recipes.training.dispatched_model import dispatch_trained_model
    from recipes.training.trained_model import load_trained_model

    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no such device here; write cpu")
    dtype: torch.dtype = getattr(torch, arguments.dtype or ("bfloat16" if name == "cuda" else "float32"))
    if arguments.device_map:
        model = dispatch_trained_model(weights, dtype=dtype)
        return model, model.model.embed_tokens.weight.device
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device("cpu")
    return load_trained_model(weights, device=device, dtype=dtype), device


def _losses(
    arguments: argparse.Namespace, model: Any, corpora: list[Any], device: Any, share: tuple[int, int]
) -> list[dict[str, Any]]:
    from recipes.training.dispatched_model import LossFromLogits
    from recipes.training.heldout_loss import heldout_loss
    from recipes.training.plan_run import LONGEST_DEFAULT_SEQUENCE

    longest = model.config.max_position_embeddings
    seq_length = arguments.seq_length or min(longest, LONGEST_DEFAULT_SEQUENCE)
    if seq_length > longest:
        raise UserError(f"--seq_length {seq_length}: the model takes at most {longest} positions")
    return [
        dataclasses.asdict(
            heldout_loss(
                LossFromLogits(model) if arguments.device_map else model,
                corpus,
                source=source,
                seq_length=seq_length,
                batch_size=arguments.batch_size,
                device=device,
                rank=share[0],
                world_size=share[1],
                document_mask=arguments.document_mask,
            )
        )
        for source, corpus in zip(arguments.data, corpora, strict=True)
    ]


def _tasks(
    arguments: argparse.Namespace, model: Any, tokenizer_folder: Path, device: Any, share: tuple[int, int]
) -> dict[str, dict[str, Any]]:
    from recipes.data.tokenizer import load_tokenizer
    from recipes.training.task_evaluation import EvaluatedModel, evaluate_tasks

    evaluated = EvaluatedModel(
        model,
        load_tokenizer(tokenizer_folder),
        batch_size=arguments.batch_size,
        device=device,
        share=share,
        use_cache=not arguments.device_map,
    )
    return evaluate_tasks(
        evaluated,
        arguments.tasks,
        include_path=arguments.include_path,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        chat=arguments.chat,
    )


def _report(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    text = json.dumps(result, default=str)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print(text)
        return
    if arguments.data:
        print(f"{'data':<32} {'split':<16} {'nats/token':>10} {'bits/byte':>10} {'perplexity':>11} {'tokens':>12}")
        for row in result["data"]:
            print(
                f"{row['source'][-32:]:<32} {row['split']:<16} {row['loss']:>10.4f} {row['bits_per_byte']:>10.4f} "
                f"{row['perplexity']:>11.3f} {row['tokens']:>12,}"
            )
    if arguments.tasks:
        print(f"{'task':<32} {'metric':<28} {'value':>10} {'stderr':>10}")
        for task, metrics in result["tasks"].items():
            for name, value in metrics.items():
                metric, _, kind = name.partition(",")
                if isinstance(value, float) and not metric.endswith("_stderr"):
                    error = metrics.get(f"{metric}_stderr,{kind}", "")
                    shown = f"{error:>10.4f}" if isinstance(error, float) else f"{error:>10}"
                    print(f"{task:<32} {metric:<28} {value:>10.4f} {shown}")


if __name__ == "__main__":
    run_rank(main)
