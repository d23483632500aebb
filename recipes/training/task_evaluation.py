"""lm-eval's tasks through our own model: log-likelihoods and generation on model/, shared among the ranks.

Importing this needs the package `lm_eval`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerFast

from model.generation import generate_tokens
from model.transformer import DeepseekForCausalLM
from recipes.config.errors import UserError

DEFAULT_NEW_TOKENS = 256  # where a task does not say
Scored = tuple[float, bool]


class EvaluatedModel(TemplateLM):
    """Our model as lm-eval sees one.

    To lm-eval every rank is alone with all requests; it is here that they are shared out, in batches that do not depend
    on the number of ranks, so the results are the same on any.

    Args:
        model: in eval mode; a whole copy on each rank.
        batch_size: sequences at once.
        use_cache: False where the model's layers lie on several devices.
    """

    def __init__(
        self,
        model: DeepseekForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch_size: int,
        device: torch.device | str,
        share: tuple[int, int],
        use_cache: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self._device, self.use_cache = batch_size, device, use_cache
        self.share_rank, self.share_ranks = share
        self.context = model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self.tokenizer(string, add_special_tokens=False)["input_ids"])

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[Scored]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._shared_out(pairs, self._score, lambda pair: len(pair[0]) + len(pair[1]))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows that predict each token once."""
        owners, windows = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.context, context_len=1):
                owners.append(owner)
                windows.append(make_disjoint_window(window))
        scores = self._shared_out(windows, self._score, lambda pair: len(pair[0]) + len(pair[1]))
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._shared_out(
            [request.args for request in requests], self._generate, lambda arguments: len(arguments[0]), batch_size=1
        )

    def _shared_out(
        self,
        items: list[Any],
        work: Callable[[list[Any]], list[Any]],
        length: Callable[[Any], int],
        batch_size: int | None = None,
    ) -> list[Any]:
        """The results of all items, in their order; batches of like length, each done by one rank."""
        order = sorted(range(len(items)), key=lambda index: (-length(items[index]), index))
        size = batch_size or self.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        mine: dict[int, Any] = {}
        for batch in batches[self.share_rank :: self.share_ranks]:
            mine.update(zip(batch, work([items[index] for index in batch]), strict=True))
        everyone: list[Any] = [mine]
        if self.share_ranks > 1:
            everyone = [None] * self.share_ranks
            torch.distributed.all_gather_object(everyone, mine)
        done = {index: result for part in everyone for index, result in part.items()}
        return [done[index] for index in range(len(items))]

    @torch.no_grad()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[Scored]:
        """(log-likelihood, whether every token was the likeliest) of each continuation after its context."""
        kept = [
            ([*context, *continuation][-(self.context + 1) :], len(continuation)) for context, continuation in pairs
        ]
        longest = max(len(tokens) for tokens, _ in kept) - 1
        ids = torch.full((len(kept), longest), self.eot_token_id)  # to the right, where no token sees it
        for row, (tokens, _) in enumerate(kept):
            ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        logits_BSV = self.model(ids.to(self._device))["logits"]
        scored = []
        for row, (tokens, wanted) in enumerate(kept):
            end = len(tokens) - 1
            begin = max(0, end - wanted)
            targets = torch.tensor(tokens[begin + 1 :], device=logits_BSV.device)
            logits = logits_BSV[row, begin:end].float()  # (continuation, V)
            chosen = F.log_softmax(logits, dim=-1).gather(1, targets.unsqueeze(1))
            scored.append((float(chosen.double().sum()), bool((logits.argmax(-1) == targets).all())))
        return scored

    def _generate(self, arguments: list[tuple[str, dict[str, Any]]]) -> list[str]:
        [(prompt, settings)] = arguments
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        wanted = min(int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.context - 1)
        prompt_ids = self.tok_encode(prompt)[-(self.context - wanted) :] or [self.prefix_token_id]
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample", True) else 0.0
        drawn: list[int] = []
        text = ""
        for token in generate_tokens(
            self.model,
            torch.tensor([prompt_ids]),
            max_new_tokens=wanted,
            temperature=temperature,
            top_p=float(settings.get("top_p", 1.0)),
            generator=torch.Generator().manual_seed(0),
            stop_ids=[self.eot_token_id],
            use_cache=self.use_cache,
        ):
            drawn.append(int(token))
            text = str(self.tokenizer.decode(drawn, skip_special_tokens=True))
            found = [text.index(stop) for stop in stops if stop and stop in text]
            if found:
                return [text[: min(found)]]
        return [text]


def evaluate_tasks(
    model: EvaluatedModel,
    tasks: list[str],
    *,
    include_path: str | None,
    num_fewshot: int | None,
    limit: float | None,
    chat: bool,
) -> dict[str, dict[str, Any]]:
    """Task -> metric -> value, as lm-eval computes them on a host's first rank; nothing on the others.

    Args:
        tasks: names. include_path: a folder with further task files.
        limit: the first so many documents of each task. chat: questions go through the chat template.
    Raises:
        UserError: no such task.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path}: no such folder; give one with task files")
    manager = TaskManager(include_path=include_path)
    known = set(manager.all_tasks)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise UserError(*(f"--tasks {task}: lm-eval knows no such task; see `lm-eval ls tasks`" for task in unknown))
    results = simple_evaluate(
        model=model,
        tasks=tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        apply_chat_template=chat,
    )
    if results is None:  # by LOCAL_RANK lm-eval lets one process of a host speak
        return {}
    return {name: dict(metrics) for name, metrics in results["results"].items()}
