"""`recipes/finetune.py` at the command line: a small model learns to answer, and users' mistakes are named."""

import json

import pytest
from chat_facts import conversations, write_jsonl, write_untrained
from launching import REPOSITORY, metrics, run_deepspeed, run_python

from recipes.config.errors import UserError, run_command
from recipes.config.finetune_config import parse_finetune_config

FINETUNE = "recipes/finetune.py"


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A folder with a model to begin with, and the data set's two files."""
    folder = tmp_path_factory.mktemp("facts")
    train, heldout = conversations()
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_untrained(folder / "base", train + heldout)
    return folder


@pytest.fixture(autouse=True)
def prepared_folder(monkeypatch, tmp_path):
    """What these tests prepare is no part of the checkout."""
    monkeypatch.setattr("recipes.training.finetuning.PREPARED_FOLDER", tmp_path / "prepared")


def prepared(facts, name):
    from recipes.data.conversation_corpus import ConversationSettings, prepare_conversations

    settings = ConversationSettings(str(facts / "base"), holdout=0.0)
    return str(prepare_conversations(str(facts / name), facts / "prepared", settings, show_progress=False))


def test_it_learns_to_answer_questions_that_were_held_out(facts, tmp_path):
    data = ["--data", prepared(facts, "train.jsonl"), "--eval_data", prepared(facts, "heldout.jsonl")]
    shape = "--max_steps 160 --global_batch_size 4 --seq_length 64 --learning_rate 5e-3 --eval_steps 40".split()
    words = [FINETUNE, "--init_from", str(facts / "base"), *data, *shape, "--output_dir", str(tmp_path / "run")]
    result = run_deepspeed([*words, "--deepspeed_config", "ds_configs/cpu.json"])
    assert result.code == 0, result.output
    assert "Assistant: The fox is red." in result.stdout, "the answer at the end of the run"
    losses = [line["eval_loss"] for line in metrics(tmp_path / "run", evaluation=True)]
    assert losses[0] > losses[-1] and losses[-1] < 0.05, losses
    for name in ("run.json", "ds_config.json", "report.html", "checkpoints/step_00000160"):
        assert (tmp_path / "run" / name).exists(), name
    _, heldout = conversations()
    assert answers(tmp_path / "run", heldout) >= 22, "of 24 held-out questions"  # measured: all of them
    said = run_python(["recipes/generate.py", str(tmp_path / "run"), "--chat", "--prompt", "What colour is the fox?"])
    assert said.stdout == "The fox is red.\n", said.output


def answers(run, records):
    """How many of the questions the trained model answers to the letter."""
    import torch

    from model.generation import generate_tokens
    from recipes.data.chat_template import prompt_ids
    from recipes.data.tokenizer import load_tokenizer
    from recipes.training.trained_model import load_trained_model, open_weights

    weights = open_weights(run)
    tokenizer = load_tokenizer(weights.tokenizer_folder)
    model = load_trained_model(weights, device="cpu", dtype=torch.float32)
    right = 0
    for record in records:
        *asked, answer = record["messages"]
        prompt = torch.tensor([prompt_ids(tokenizer, asked)])
        drawn = generate_tokens(model, prompt, max_new_tokens=24, temperature=0, stop_ids={tokenizer.eos_token_id})
        said = tokenizer.decode([int(token) for token in drawn], skip_special_tokens=True).strip()
        print(f"{asked[-1]['content']:<40} {said}")
        right += said == answer["content"]
    return right


@pytest.fixture
def flags(facts, tmp_path):
    words = f"--init_from {facts / 'base'} --data {facts / 'train.jsonl'} --global_batch_size 4 --seq_length 64"
    return [*words.split(), "--output_dir", str(tmp_path / "run"), "--deepspeed_config", "ds_configs/cpu.json"]


def dry_run(capsys, words):
    from recipes.finetune import main

    assert run_command(lambda: main([*words, "--dry_run", "--json"])) == 0
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), lines


def test_dry_run_counts_epochs_and_sets_the_rate(capsys, flags, tmp_path):
    plan, lines = dry_run(capsys, [*flags, "--num_train_epochs", "3", "--learning_rate", "1e-4", "--holdout", "0"])
    packing = next(line for line in lines if line.startswith("packing"))
    sequences = int(packing.split(" conversations in ")[1].split()[0])
    assert plan["max_steps"] == -(-3 * sequences // 4)  # by hand: sequences of three epochs, four a step
    assert plan["peak_learning_rate"] == 1e-4, "not scaled with the batch"
    scheduler = plan["ds_config"]["scheduler"]
    assert scheduler["type"] == "cosine" and scheduler["params"]["min_ratio"] == 0.2
    assert not (tmp_path / "run").exists()
    plan, _ = dry_run(capsys, [*flags, "--set", "optimizer.params.lr=0.5", "--max_steps", "7"])
    assert plan["max_steps"] == 7 and plan["peak_learning_rate"] == 0.5, "what the user sets wins"


def mistake(capsys, words):
    from recipes.finetune import main

    code = run_command(lambda: main(words))
    captured = capsys.readouterr()
    assert code == 2, captured
    lines = captured.err.strip().splitlines()
    lines = [line for line in lines if line.startswith("error: ")]
    assert lines, captured.err
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["--fim_rate", "0.1"], "unknown flag --fim_rate"),
        (["--batch_ramp", "2:100"], "unknown flag --batch_ramp"),
        (["--init_from", "/nowhere"], "/nowhere: no such folder"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--seq_length", "65"], "max_position_embeddings"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0.0: must be above 0"),
        (["--holdout", "0.2", "--eval_data", "x.jsonl"], "--holdout 0.2 with --eval_data"),
        (["--lora_alpha", "8"], "--lora_alpha: there are no adapters without --lora_rank"),
        (["--chat_template", "/nowhere.jinja"], "--chat_template /nowhere.jinja"),
        (["--global_batch_size", "400"], "fewer than one global batch of 400"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(capsys, flags, tmp_path, changed, expected):
    assert expected in mistake(capsys, [*flags, *changed])
    assert not (tmp_path / "run").exists()


def test_a_bad_record_is_named_by_file_and_line(capsys, flags, facts, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((facts / "train.jsonl").read_text() + '{"messages": [{"role": "user", "content": "Hi"}]}\n')
    fault = mistake(capsys, [*flags, "--data", str(broken)])
    assert f"{broken}:73: no assistant turn" in fault and "--on_error skip" in fault
    _, lines = dry_run(capsys, [*flags, "--data", str(broken), "--on_error", "skip", "--holdout", "0"])
    assert any("72 conversations in" in line for line in lines)


def test_without_a_model_or_data_it_says_what_to_give():
    with pytest.raises(UserError) as error:
        parse_finetune_config([])
    assert [fault.split(":")[0] for fault in error.value.faults] == ["--init_from", "--data"]


def test_the_folder_of_a_pretraining_run_is_refused(capsys, flags, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"arguments": {"train_tokens": None}}))
    assert "holds another recipe's run" in mistake(capsys, flags)


def test_adapters_without_peft_and_on_fused_experts_are_refused_by_name(capsys, flags, monkeypatch):
    monkeypatch.setattr("recipes.training.adapters.find_spec", lambda name: None)
    assert "pip install peft" in mistake(capsys, [*flags, "--lora_rank", "4"])
    monkeypatch.setattr("recipes.training.adapters.find_spec", lambda name: object())
    fault = mistake(capsys, [*flags, "--lora_rank", "4", "--lora_target", "o_proj", "experts", "q_prj"])
    assert "--lora_target experts: the routed experts are fused" in fault and "kv_b_proj" in fault
    assert "--lora_target q_prj: no linear layer has that name" in fault and "o_proj:" not in fault


def test_pretraining_refuses_prepared_conversations(capsys, facts):
    from recipes.pretrain import main

    folder = prepared(facts, "train.jsonl")
    words = ["--data", folder, "--output_dir", str(facts / "never"), "--max_steps", "1"]
    assert run_command(lambda: main(words)) == 2
    assert "holds prepared conversations, where text is needed" in capsys.readouterr().err
    assert str(REPOSITORY) not in folder
