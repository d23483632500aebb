"""Tokenizers: every text comes back, special tokens stay special, and other people's tokenizers load."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.encode import LONGEST_ENCODED_TEXT, Encoder, EncoderSettings, split_long_text
from recipes.data.tokenizer import (
    EOS_TOKEN,
    FIM_TOKENS,
    PAD_TOKEN,
    add_fim_tokens,
    encoder_json,
    find_fim_tokens,
    load_tokenizer,
    padded_vocabulary_size,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\r\n" * 30
HARD_TEXTS = [
    "",
    " ",
    "\n\n\t  x",
    "1234567",
    "naïve Ünïcode 漢字 🙂\u200d",
    "\x00\x01\x7f",
    "a_b.c(d)[e]  #\n\n    !",
    "\ufeffx",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 3, 280)


def encoder(tokenizer, vocab_size=10**6):
    return Encoder(EncoderSettings(encoder_json(tokenizer), tokenizer.eos_token_id, vocab_size, "text", "stop"))


def test_trained_vocabulary(tokenizer):
    assert vocabulary_size(tokenizer) == len(tokenizer) == 280
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS_TOKEN, PAD_TOKEN)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert find_fim_tokens(tokenizer) == (3, 4, 5)


@pytest.mark.parametrize("text", [*HARD_TEXTS, TEXT])
def test_every_text_comes_back(tokenizer, text):
    (ids,) = encoder(tokenizer).encode_texts([text])
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text


def test_training_is_repeatable(tokenizer):
    assert encoder_json(train_tokenizer([TEXT] * 3, 280)) == encoder_json(tokenizer)


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(UserError, match="--train_tokenizer 261: .* at least 262"):
        train_tokenizer([TEXT], 261)


def test_saved_folder_loads_in_transformers(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "t")
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    for text in HARD_TEXTS:
        assert loaded(text, add_special_tokens=False)["input_ids"] == encoder(tokenizer).encode_texts([text])[0][:-1]
    assert (loaded.eos_token, loaded.pad_token, loaded.eos_token_id) == (EOS_TOKEN, PAD_TOKEN, 1)
    assert encoder_json(load_tokenizer(tmp_path / "t")) == encoder_json(
        load_tokenizer(tmp_path / "t" / "tokenizer.json")
    )


def test_a_text_cannot_forge_the_end_of_a_document(tokenizer):
    (ids,) = encoder(tokenizer).encode_texts([f"a{EOS_TOKEN}b{FIM_TOKENS[0]}"])
    assert ids.count(tokenizer.eos_token_id) == 1 and not set(ids) & {0, 2, 3, 4, 5}
    assert tokenizer.decode(ids[:-1]) == f"a{EOS_TOKEN}b{FIM_TOKENS[0]}"


def test_long_texts_are_cut_at_lines_and_stay_whole(tokenizer):
    line = "x = 1  # a line.\n"  # 17 characters, which no power of two is a multiple of
    for text in (line * (3 * LONGEST_ENCODED_TEXT // len(line)), "z" * (2 * LONGEST_ENCODED_TEXT + 3)):
        parts = list(split_long_text(text))
        assert "".join(parts) == text and len(parts) >= 3
        assert all(len(part) <= LONGEST_ENCODED_TEXT for part in parts)
        assert all(part.endswith("\n") for part in parts[:-1]) or "\n" not in text
    texts = [line * (LONGEST_ENCODED_TEXT // len(line) + 5), "short"]
    long_ids, short_ids = encoder(tokenizer).encode_texts(texts)
    assert tokenizer.decode(long_ids[:-1]) == texts[0] and tokenizer.decode(short_ids[:-1]) == "short"


def word_level(tmp_path, words, **config):
    folder = tmp_path / "words"
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_bare_tokenizers_folder(tmp_path):
    loaded = load_tokenizer(word_level(tmp_path, ["<unk>", "hello", "</s>"]))
    assert (loaded.eos_token, loaded.eos_token_id, vocabulary_size(loaded)) == ("</s>", 2, 3)
    assert encoder(loaded).encode_texts(["hello hello"]) == [[1, 1, 2]]


def test_fim_tokens_of_their_own_or_added(tmp_path):
    own = load_tokenizer(word_level(tmp_path, ["<unk>", "<fim_suffix>", "</s>", "<fim_prefix>", "<fim_middle>"]))
    assert add_fim_tokens(own) == (3, 1, 4) and vocabulary_size(own) == 5
    without = load_tokenizer(word_level(tmp_path, ["<unk>", "hello", "</s>"]))
    assert find_fim_tokens(without) is None
    assert add_fim_tokens(without) == (3, 4, 5) and vocabulary_size(without) == 6
    save_tokenizer(without, tmp_path / "with")
    assert find_fim_tokens(load_tokenizer(tmp_path / "with")) == (3, 4, 5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path / "absent", "no tokenizer can be loaded from it"),
        (lambda path: path, "no tokenizer can be loaded from it"),
        (lambda path: word_level(path, ["<unk>", "hello"]), "it names no eos_token"),
    ],
)
def test_tokenizers_that_cannot_serve(tmp_path, make, message):
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(make(tmp_path))
    assert len(caught.value.faults) == 1 and "\n" not in caught.value.faults[0]


def test_truncation_of_a_tokenizer_is_not_applied(tmp_path):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(word_level(tmp_path, ["<unk>", "a", "</s>"]) / "tokenizer.json")
    )
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encoder(tokenizer).encode_texts(["a a a a a"]) == [[1, 1, 1, 1, 1, 2]]


def test_padded_vocabulary_size():
    assert [padded_vocabulary_size(size, 128) for size in (1, 128, 129, 4096, 129280)] == [128, 128, 256, 4096, 129280]
