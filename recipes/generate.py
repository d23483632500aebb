"""Continue a prompt with a trained model, token by token.

python recipes/generate.py runs/tiny --prompt "def main("
python recipes/generate.py exported/tiny --prompt "import os" --temperature 0.7 --top_p 0.9 --seed 1
python recipes/generate.py runs/chat --chat --prompt "What colour is the fox?"
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import UserError, run_command

DTYPES = ("float32", "bfloat16", "float16")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Continue a prompt. The text appears as it is drawn; what was seen is kept as compressed latents.",
    )
    add = parser.add_argument
    add("checkpoint", help="a run's folder (its newest checkpoint), a checkpoint's folder, or a Hugging Face folder")
    add("--prompt", required=True, help="the text to continue")
    add("--chat", action="store_true", help="the prompt is a user's turn: answer it, by the tokenizer's chat template")
    add("--max_new_tokens", type=int, default=128, help="tokens to draw at most (default: 128)")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token each time (default: 0.7)")
    add("--top_p", type=float, default=0.95, help="draw among the likeliest tokens that reach this sum (default: 0.95)")
    add("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on cuda, float32 on a cpu)")
    add("--json", action="store_true", help="print one JSON object at the end instead of the text as it comes")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Load the model, print the prompt and what follows it."""
    arguments = build_parser().parse_args(argv)
    _check(arguments)
    import torch

    from model.generation import generate_tokens
    from recipes.cluster.host_memory import keep_freed_memory
    from recipes.data.tokenizer import load_tokenizer
    from recipes.training.trained_model import load_trained_model, open_weights

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no such device here; write cpu")
    if device == "cpu":
        keep_freed_memory()
    dtype: torch.dtype = getattr(torch, arguments.dtype or ("bfloat16" if device == "cuda" else "float32"))
    weights = open_weights(arguments.checkpoint)
    if weights.tokenizer_folder is None:
        raise UserError(f"{arguments.checkpoint}: holds no tokenizer.json; copy the model's tokenizer into it")
    tokenizer: Any = load_tokenizer(weights.tokenizer_folder)
    prompt_ids = _prompt_ids(tokenizer, arguments)
    if not prompt_ids:  # an empty prompt begins a document
        prompt_ids = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    room = weights.config.max_position_embeddings - len(prompt_ids)
    if room < 1:
        raise UserError(f"--prompt: {len(prompt_ids)} tokens leave no room in the context of {room + len(prompt_ids)}")
    model = load_trained_model(weights, device=device, dtype=dtype)
    started = time.perf_counter()
    drawn = generate_tokens(
        model,
        torch.tensor([prompt_ids]),
        max_new_tokens=min(arguments.max_new_tokens, room),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        generator=torch.Generator().manual_seed(arguments.seed),
        stop_ids={tokenizer.eos_token_id},
    )
    tokens: list[int] = []
    text = ""
    if not arguments.json and not arguments.chat:
        print(arguments.prompt, end="", flush=True)
    with torch.inference_mode():  # for the sampling above, too, which runs as its tokens are asked for
        for piece in _pieces(tokenizer, (int(token) for token in drawn), tokens):
            if arguments.chat and not text:
                piece = piece.lstrip()  # the template's space before an answer
            text += piece
            if not arguments.json:
                print(piece, end="", flush=True)
    seconds = time.perf_counter() - started
    if arguments.json:
        result = {"prompt": arguments.prompt, "text": text, "tokens": tokens}
        print(json.dumps(result | {"tokens_per_second": round(len(tokens) / seconds, 1)}))
    else:
        print()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError with every flag that is out of range."""
    faults = []
    if arguments.max_new_tokens < 1:
        faults.append(f"--max_new_tokens {arguments.max_new_tokens}: must be at least 1")
    if arguments.temperature < 0:
        faults.append(f"--temperature {arguments.temperature}: must be at least 0")
    if not 0 < arguments.top_p <= 1:
        faults.append(f"--top_p {arguments.top_p}: must be above 0 and at most 1")
    if faults:
        raise UserError(*faults)


def _prompt_ids(tokenizer: Any, arguments: argparse.Namespace) -> list[int]:
    """Raises UserError: --chat without a chat template."""
    if not arguments.chat:
        return list(tokenizer(arguments.prompt, add_special_tokens=False)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError(
            f"--chat: the tokenizer of {arguments.checkpoint} has no chat template; fine-tuning gives it one"
        )
    from recipes.data.chat_template import prompt_ids

    return prompt_ids(tokenizer, [{"role": "user", "content": arguments.prompt}])


def _pieces(tokenizer: Any, drawn: Iterator[int], tokens: list[int]) -> Iterator[str]:
    """Text as it becomes whole: a character of several tokens waits for its last one. `tokens` collects the ids."""
    begin, shown = 0, 0  # the ids decoded together, and how much of their text is out
    for token in drawn:
        tokens.append(token)
        text = tokenizer.decode(tokens[begin:], skip_special_tokens=True)
        if text.endswith(UNFINISHED):
            continue
        yield text[shown:]
        shown = len(text)
        if text.endswith("\n"):
            begin, shown = len(tokens), 0
    yield tokenizer.decode(tokens[begin:], skip_special_tokens=True)[shown:]


if __name__ == "__main__":
    sys.exit(run_command(main))
