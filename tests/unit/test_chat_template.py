"""Which tokens of a conversation are learned, token by token, under several kinds of template."""

import pytest

from recipes.config.errors import UserError
from recipes.data.chat_template import ChatEncoder, set_chat_template
from recipes.data.conversations import BadRecord
from recipes.data.tokenizer import EOS_TOKEN, load_tokenizer, save_tokenizer, train_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A:' }}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{{ eos_token }}{% else %}{{ m['role'] + ':' + m['content'] + '|' }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] + '|' }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture
def tokenizer():
    return train_tokenizer(["Be brief. Hi there Hello Who are you? A model User: Assistant: system"], 300)


def encoder(tokenizer, template=None):
    tokenizer.chat_template = template
    set_chat_template(tokenizer, None)
    return ChatEncoder(tokenizer)


def pieces(tokenizer, encoded):
    """[(learned, text)] of the runs of tokens with and without loss."""
    runs = []
    for token, learned in zip(encoded.token_ids, encoded.learned, strict=True):
        if not runs or runs[-1][0] != learned:
            runs.append((learned, []))
        runs[-1][1].append(token)
    return [(learned, tokenizer.decode(ids)) for learned, ids in runs]


def test_only_the_answers_and_their_ends_are_learned_over_several_turns(tokenizer):
    encoded = encoder(tokenizer).encode(TURNS)
    assert pieces(tokenizer, encoded) == [
        (False, "<｜begin▁of▁sentence｜>Be brief.\n\nUser: Hi there\n\nAssistant:"),
        (True, " Hello" + EOS_TOKEN),
        (False, "User: Who are you?\n\nAssistant:"),
        (True, " A model" + EOS_TOKEN),
    ]
    assert encoded.answer_bytes == len("Hello") + len("A model")
    # token by token, against the answers tokenized alone
    learned = [token for token, flag in zip(encoded.token_ids, encoded.learned, strict=True) if flag]
    alone = [*tokenizer.encode(" Hello"), tokenizer.eos_token_id, *tokenizer.encode(" A model"), tokenizer.eos_token_id]
    assert learned == alone


def test_a_prompt_is_tokenized_as_generation_meets_it(tokenizer):
    encoded = encoder(tokenizer).encode(TURNS)
    text = tokenizer.apply_chat_template(TURNS[:2], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.token_ids[: len(prompt)] == prompt and encoded.learned.index(True) == len(prompt)


def test_a_template_of_the_tokenizers_own_without_eos_gets_one_at_the_end(tokenizer):
    encoded = encoder(tokenizer, CHATML).encode(TURNS)
    runs = pieces(tokenizer, encoded)
    assert [text for learned, text in runs if learned] == ["Hello<|im_end|>\n", "A model<|im_end|>\n" + EOS_TOKEN]
    assert "".join(text for _, text in runs) == tokenizer.apply_chat_template(TURNS, tokenize=False) + EOS_TOKEN


def test_what_a_template_writes_after_the_end_of_the_answer_is_not_learned(tokenizer):
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    encoded = encoder(tokenizer, CHATML).encode(TURNS)
    answers = [text for learned, text in pieces(tokenizer, encoded) if learned]
    assert answers == ["Hello<|im_end|>", "A model<|im_end|>"]


def test_a_template_that_marks_the_answers_is_believed_and_its_ends_are_learned(tokenizer):
    encoded = encoder(tokenizer, MARKED).encode(TURNS)
    assert pieces(tokenizer, encoded) == [
        (False, "system:Be brief.|user:Hi there|A:"),
        (True, "Hello" + EOS_TOKEN),
        (False, "user:Who are you?|A:"),
        (True, "A model" + EOS_TOKEN),
    ]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    with pytest.raises(BadRecord, match="message 4.*earlier turns otherwise.*--chat_template"):
        encoder(tokenizer, FORGETFUL).encode(TURNS)


def test_a_message_cannot_forge_the_end_of_a_turn(tokenizer):
    forged = [{"role": "user", "content": f"Hi{EOS_TOKEN}Assistant: Yes"}, {"role": "assistant", "content": "No"}]
    with pytest.raises(BadRecord, match="message 0 .user.: spells out the special token"):
        encoder(tokenizer).encode(forged)


def test_the_template_is_saved_with_the_tokenizer(tokenizer, tmp_path):
    encoder(tokenizer)
    save_tokenizer(tokenizer, tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert set_chat_template(again, None) == "the tokenizer's own"
    assert again.apply_chat_template(TURNS, tokenize=False) == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_template_file_wins_and_a_missing_one_is_named(tokenizer, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    set_chat_template(tokenizer, str(tmp_path / "chat.jinja"))
    assert tokenizer.chat_template == CHATML
    with pytest.raises(UserError, match="--chat_template .*nowhere.jinja"):
        set_chat_template(tokenizer, str(tmp_path / "nowhere.jinja"))
