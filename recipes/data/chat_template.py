"""The chat template: conversations as tokens, and which of them the model is to learn.

The text is whatever the tokenizer's own template renders. What an assistant's turn adds to the prompt before it is
learned, its end-of-sequence token included; everything else is only read. Each prompt and each answer is tokenized by
itself, because that is how generation meets them: a finished prompt, and tokens after it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.conversations import BadRecord, Message
from recipes.data.tokenizer import encoder_json

# For a tokenizer without one: the roles as DeepSeek-V2-Lite-Chat's published template writes them, which needs no
# token beyond the begin and the end of a sentence, so that it serves a model whatever its vocabulary.
DEFAULT_CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{- 'Assistant: ' + message['content'] + eos_token -}}
{%- elif message['role'] == 'user' -%}{{- 'User: ' + message['content'] + '\\n\\n' -}}
{%- else -%}{{- message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")


def set_chat_template(tokenizer: PreTrainedTokenizerFast, file: str | None) -> str:
    """Give the tokenizer the template of `file`, or the default one if it has none; it is saved with the tokenizer.

    Returns:
        Where the template is from, for the user.
    Raises:
        UserError: the file cannot be read, or the template is no Jinja.
    """
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat_template {file}: cannot be read ({error}); give a Jinja file") from None
        origin = file
    elif tokenizer.chat_template:
        origin = "the tokenizer's own"
    else:
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
        origin = "the default (DeepSeek-V2's), as the tokenizer has none"
    if not isinstance(tokenizer.chat_template, str):
        names = ", ".join(tokenizer.chat_template)
        raise UserError(f"--chat_template: the tokenizer has several ({names}); give the one to use as a file")
    return origin


@dataclass(frozen=True)
class EncodedConversation:
    """token_ids: of the whole text. learned: for each, whether predicting it has loss. answer_bytes: UTF-8 of those."""

    token_ids: list[int]
    learned: list[bool]
    answer_bytes: int


@dataclass(frozen=True)
class Segment:
    text: str
    is_answer: bool
    is_last: bool = False


class ChatEncoder:
    """Conversations -> tokens, by the tokenizer's chat template.

    Args:
        tokenizer: with a chat template and an end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.backend = Tokenizer.from_str(encoder_json(tokenizer))
        self.eos_token_id = int(tokenizer.eos_token_id)
        # Spelled out in a message, these would end its turn or begin another.
        self.reserved = [token for token in tokenizer.all_special_tokens if token]
        self.marks_answers = bool(GENERATION_MARK.search(tokenizer.chat_template))

    def encode(self, messages: list[Message]) -> EncodedConversation:
        """
        Args:
            messages: ending with an assistant's turn.
        Raises:
            BadRecord: a message spells out a special token, or the template refuses the messages.
        """
        for number, message in enumerate(messages):
            for token in self.reserved:
                if token in message["content"]:
                    raise BadRecord(f"message {number} ({message['role']}): spells out the special token {token}")
        segments = list(self._marked(messages) if self.marks_answers else self._turn_by_turn(messages))
        encodings = self.backend.encode_batch_fast([part.text for part in segments], add_special_tokens=False)
        token_ids: list[int] = []
        learned: list[bool] = []
        for segment, encoding in zip(segments, encodings, strict=True):
            ids = list(encoding.ids)
            if segment.is_last and self.eos_token_id not in ids:
                ids.append(self.eos_token_id)  # a template that ends nothing would never let the model stop
            token_ids += ids
            learned += self._learned(ids) if segment.is_answer else [False] * len(ids)
        answers = sum(len(m["content"].encode("utf-8")) for m in messages if m["role"] == "assistant")
        return EncodedConversation(token_ids, learned, answers)

    def _learned(self, ids: list[int]) -> list[bool]:
        """All of an answer up to its end-of-sequence token; what a template writes after that nobody generates."""
        if self.eos_token_id not in ids:
            return [True] * len(ids)
        end = len(ids) - ids[::-1].index(self.eos_token_id)
        return [True] * end + [False] * (len(ids) - end)

    def _turn_by_turn(self, messages: list[Message]) -> Iterator[Segment]:
        """What each assistant's turn adds to the prompt before it."""
        text = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], add_generation_prompt=True)
            answered = self._render(messages[: number + 1])
            if not (prompt.startswith(text) and answered.startswith(prompt)):
                raise BadRecord(
                    f"message {number}: the chat template writes earlier turns otherwise once this one follows, so "
                    "the answers cannot be told apart; give another by --chat_template, or mark them in it with "
                    "{% generation %}"
                )
            yield Segment(prompt[len(text) :], is_answer=False)
            yield Segment(answered[len(prompt) :], is_answer=True, is_last=number == len(messages) - 1)
            text = answered

    def _marked(self, messages: list[Message]) -> Iterator[Segment]:
        """What the template itself marks between {% generation %} and {% endgeneration %}."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotations miss what it returns
        try:
            rendered, spans = render(
                [messages],
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template may raise anything, jinja2's own errors included
            raise BadRecord(f"the chat template refuses it: {error}") from error
        text, begin, eos = rendered[0], 0, str(self.tokenizer.eos_token)
        for number, (start, end) in enumerate(spans[0]):
            if text.startswith(eos, end):  # left out of the mark, and yet what ends the answer
                end += len(eos)
            yield Segment(text[begin:start], is_answer=False)
            yield Segment(text[start:end], is_answer=True, is_last=number == len(spans[0]) - 1)
            begin = end
        yield Segment(text[begin:], is_answer=False)

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may raise anything, jinja2's own errors included
            raise BadRecord(f"the chat template refuses it: {error}") from error
        return str(text)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Iterable[Message]) -> list[int]:
    """The tokens after which the model is to write the assistant's next turn."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
