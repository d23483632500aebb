"""generate.py: text that comes as it is drawn, the same for the same seed."""

import json

import pytest
import torch

from model.config import load_model_config
from model.hf_weights import parts_of_state, save_hf_weights
from model.transformer import DeepseekForCausalLM
from recipes import generate
from recipes.config.errors import UserError
from recipes.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A Hugging Face folder of an untrained tiny model, whose tokens are single bytes and a few pairs."""
    folder = tmp_path_factory.mktemp("exported")
    train_tokenizer(["def f(x):\n    return x  # naïve €\n" * 20], 300).save_pretrained(folder)
    config = load_model_config("tiny")
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    with torch.no_grad():
        model.lm_head.weight[300:] = 0
        model.lm_head.weight[:300] *= 50  # far from even, so that the draws are worth comparing
        model.lm_head.weight[:6] = 0  # special tokens
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_hf_weights(parts_of_state(model.state_dict(), config), config, folder, dtype=torch.float32)
    return folder


def run(capsys, *arguments):
    assert generate.main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def test_the_prompt_and_what_follows(exported, capsys):
    common = (exported, "--prompt", "def ", "--max_new_tokens", 24)
    text = run(capsys, *common)
    result = json.loads(run(capsys, *common, "--json"))
    assert text == "def " + result["text"] + "\n"
    assert 1 <= len(result["tokens"]) <= 24 and result["tokens_per_second"] > 0
    assert run(capsys, *common) == text
    assert run(capsys, *common, "--seed", 1) != text
    greedy = run(capsys, *common, "--temperature", 0)
    assert greedy == run(capsys, *common, "--temperature", 0, "--seed", 5, "--top_p", 0.5)


def test_an_empty_prompt_begins_a_document(exported, capsys):
    assert json.loads(run(capsys, exported, "--prompt", "", "--max_new_tokens", 2, "--json"))["tokens"]


def test_characters_of_several_tokens_come_whole(exported):
    from recipes.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(exported)
    text = "x = '€ naïve'\n# 日本\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text) - 10
    collected = []
    pieces = list(generate._pieces(tokenizer, iter(ids), collected))
    assert "".join(pieces) == text
    assert collected == ids
    assert not any(generate.UNFINISHED in piece for piece in pieces)


def test_users_mistakes(exported, tmp_path):
    common = [str(exported), "--prompt", "x"]
    with pytest.raises(UserError) as error:
        generate.main([*common, "--temperature", "-1", "--top_p", "0", "--max_new_tokens", "0"])
    assert [fault.split()[0] for fault in error.value.faults] == ["--max_new_tokens", "--temperature", "--top_p"]
    with pytest.raises(UserError, match="no such folder"):
        generate.main([str(tmp_path / "nowhere"), "--prompt", "x"])
    with pytest.raises(UserError, match="leave no room in the context of 256"):
        generate.main([str(exported), "--prompt", "x y " * 300])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            generate.main([*common, "--device", "cuda"])
