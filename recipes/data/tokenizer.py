"""Tokenizers: any folder, file or hub id that transformers knows, or a byte-level BPE trained on the corpus."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.config.errors import UserError

BOS_TOKEN = "<｜begin▁of▁sentence｜>"
EOS_TOKEN = "<｜end▁of▁sentence｜>"
PAD_TOKEN = "<｜▁pad▁｜>"
# prefix, suffix, middle: the order in which V3 writes them (arXiv 2412.19437, section 4.1)
FIM_TOKENS = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
# (prefix, suffix, middle) under the names that published tokenizers use
KNOWN_FIM_TOKENS = (
    FIM_TOKENS,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
KNOWN_EOS_TOKENS = (EOS_TOKEN, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")

# What may become one token: up to three digits; a word with the character before it; a run of punctuation with the line
# end and the indentation after it; a line end with the indentation after it. Keeping indentation with its line end
# gives 10% more bytes per token on Python sources than GPT-2's pattern does at 4,096 tokens (3.84 against 3.48).
DIGITS_PATTERN = r"\p{N}{1,3}"
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}_]+| ?[^\s\p{L}\p{N}]+[\r\n]*[ \t]*|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
SMALLEST_VOCABULARY = 256 + 6  # each byte, and the six special tokens


def load_tokenizer(name_or_folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, a tokenizer.json, or a hub id.

    Raises:
        UserError: nothing there, not a `tokenizers` tokenizer, or no end-of-sequence token.
    """
    name = str(name_or_folder)
    path = Path(name)
    try:
        if path.is_file() or (path.is_dir() and not (path / "tokenizer_config.json").exists()):
            file = path if path.is_file() else path / "tokenizer.json"
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file))
        else:
            tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers and tokenizers raise bare Exceptions for unreadable files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--tokenizer {name}: no tokenizer can be loaded from it ({reason}); give a folder with tokenizer.json, "
            "a tokenizer.json, or a hub id"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"--tokenizer {name}: {type(tokenizer).__name__} has no tokenizer.json; only those of the "
            "`tokenizers` library are read"
        )
    if tokenizer.eos_token_id is None:
        vocabulary = tokenizer.get_vocab()
        eos_token = next((token for token in KNOWN_EOS_TOKENS if token in vocabulary), None)
        if eos_token is None:
            raise UserError(
                f'--tokenizer {name}: it names no eos_token, which ends each document; add "eos_token" to its '
                "tokenizer_config.json"
            )
        tokenizer.add_special_tokens({"eos_token": eos_token})
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`; it has DeepSeek's special tokens, those for fill-in-the-middle included.

    Args:
        texts: the documents; they are read once.
        vocab_size: ids in all, special tokens and the 256 bytes included; there are fewer where the texts have no more
            pairs to merge.
    Raises:
        UserError: vocab_size has no room for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"--train_tokenizer {vocab_size}: 256 bytes and 6 special tokens need a vocabulary of at least "
            f"{SMALLEST_VOCABULARY}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGITS_PATTERN), "isolated"),
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, *FIM_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=list(FIM_TOKENS),
        clean_up_tokenization_spaces=False,
    )


def find_fim_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int, int] | None:
    """The ids of the tokenizer's own (prefix, suffix, middle) tokens, or None where it has none."""
    vocabulary = tokenizer.get_vocab()
    for names in KNOWN_FIM_TOKENS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (vocabulary[name] for name in names)
            return prefix, suffix, middle
    return None


def add_fim_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int, int]:
    """The ids of (prefix, suffix, middle); where the tokenizer has none, DeepSeek's are added at its end."""
    found = find_fim_tokens(tokenizer)
    if found is not None:
        return found
    tokenizer.add_tokens(list(FIM_TOKENS), special_tokens=True)
    added = find_fim_tokens(tokenizer)
    assert added is not None
    return added


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: the least vocab_size of a model for this tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1


def padded_vocabulary_size(size: int, multiple: int) -> int:
    """The next multiple at or above `size`; a GPU's matrix units want the head's width to be one (128 serves all)."""
    return (size + multiple - 1) // multiple * multiple


def encoder_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tokenizer as JSON text, without truncation or padding, for processes that do not import transformers."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    return json.dumps(state, ensure_ascii=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer so that AutoTokenizer.from_pretrained(folder) loads it."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
