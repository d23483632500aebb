"""Loss and bits per byte of a trained model over files or prepared folders, the same on any number of ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.config.errors import UserError
from recipes.data.conversation_corpus import KIND, ConversationSettings, open_conversations, prepare_conversations
from recipes.data.conversation_data import evaluation_batches
from recipes.data.corpus import Manifest, PreparedCorpus, is_prepared
from recipes.data.prepare import hash_tokenizer, prepare_all
from recipes.data.tokenizer import load_tokenizer
from recipes.training.data_sources import PREPARED_FOLDER
from recipes.training.evaluation import as_evaluation, sum_losses


@dataclass(frozen=True)
class HeldoutLoss:
    """Of one source. loss: nats per token; perplexity: its exponential; num_bytes: UTF-8 bytes of the text."""

    source: str
    split: str
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    num_bytes: int


def open_evaluation_data(
    specs: list[str], tokenizer_folder: Path, *, split: str, conversations: bool, text_key: str = "text"
) -> list[PreparedCorpus]:
    """The text, or the conversations, that each source holds, as tokens of the model's own tokenizer.

    Args:
        specs: prepared folders, of which `split` is read, or files, which are read whole.
        conversations: files hold conversations: loss on the assistant's turns alone.
    Raises:
        UserError: a source that cannot be read, prepared with another tokenizer, or without a token to predict.
    """
    corpora, faults = [], []
    ours = hash_tokenizer(load_tokenizer(tokenizer_folder))
    for spec in specs:
        if is_prepared(spec):
            corpus = PreparedCorpus.open(spec, split, kind=Manifest.read(Path(spec)).kind)
            if hash_tokenizer(load_tokenizer(corpus.tokenizer_folder)) != ours:
                faults.append(f"--data {spec}: prepared with another tokenizer than the model's; give the text itself")
        elif conversations:
            settings = ConversationSettings(str(tokenizer_folder), holdout=0.0)
            corpus = open_conversations(prepare_conversations(spec, PREPARED_FOLDER, settings), "train")
        else:
            [folder] = prepare_all(
                [spec], PREPARED_FOLDER, tokenizer=str(tokenizer_folder), holdout=0.0, text_key=text_key
            )
            corpus = PreparedCorpus.open(folder, "train")
        if corpus.num_tokens < 2:
            faults.append(f"--data {spec}: its {corpus.split} split is empty; choose another by --split")
        corpora.append(corpus)
    if faults:
        raise UserError(*faults)
    return corpora


def heldout_loss(
    model: Callable[..., Any],
    corpus: PreparedCorpus,
    *,
    source: str,
    seq_length: int,
    batch_size: int,
    device: torch.device | str,
    rank: int,
    world_size: int,
    document_mask: bool,
) -> HeldoutLoss:
    """Each token predicted once; ranks take whole batches in turn, so a batch is the same whatever their number.

    Args:
        model: in eval mode, a whole copy on each rank. batch_size: in sequences. seq_length: S [tokens].
    """
    batches = evaluation_batches(
        corpus,
        seq_length=seq_length,
        micro_batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        document_mask=document_mask,
    )
    totals = sum_losses(model, batches, device)
    if world_size > 1:
        if torch.distributed.get_backend() == "nccl":  # it carries a GPU's tensors alone, also with --device cpu
            totals = totals.cuda()
        torch.distributed.all_reduce(totals)
    result = as_evaluation(totals, corpus.num_bytes)
    split = corpus.split if corpus.manifest.settings["holdout"] else "all"
    split += ", answers" if corpus.manifest.kind == KIND else ""
    return HeldoutLoss(
        source, split, result.loss, math.exp(result.loss), result.bits_per_byte, result.tokens, corpus.num_bytes
    )
