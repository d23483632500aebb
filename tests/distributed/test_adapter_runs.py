"""Fine-tuning with adapters at every ZeRO stage: only the named layers change, resumed or not, and all stages agree."""

import json

import pytest
import torch
from chat_facts import conversations, write_jsonl, write_untrained
from launching import metrics, run_ranks

pytest.importorskip("peft", reason="needs peft, which is optional: pip install peft")

TARGETS = ("q_b_proj", "o_proj")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    train, heldout = conversations()
    write_jsonl(folder / "train.jsonl", train)
    write_untrained(folder / "base", train + heldout)
    shared = f"--init_from {folder / 'base'} --data {folder / 'train.jsonl'} --global_batch_size 4 --seq_length 64"
    shared += (
        f" --deepspeed_config ds_configs/cpu.json --learning_rate 1e-2 --lora_rank 4 --lora_target {' '.join(TARGETS)}"
    )

    def words(name, stage, steps):
        constant = ['scheduler={"type":"constant"}', f"zero_optimization.stage={stage}"]
        return [*shared.split(), "--output_dir", str(folder / name), "--max_steps", str(steps), "--set", *constant]

    jobs = folder / "jobs.json"
    finetunes = [words(f"stage{stage}", stage, 8) for stage in range(4)]
    finetunes += [words(f"halves{stage}", stage, steps) for stage in (1, 3) for steps in (4, 8)]
    jobs.write_text(json.dumps({"finetune": finetunes, "evaluate": []}))
    run_ranks(["tests/distributed/train_finetunes.py", str(jobs)], ranks=1)
    return folder


def tensors(path):
    from model.hf_layout import file_parts
    from recipes.training.trained_model import open_weights

    weights = open_weights(path)
    source = weights.source(weights.config)
    return {part.file_name: source(part).clone() for part in file_parts(weights.config)}


def test_only_the_named_layers_change_and_the_loss_falls(runs):
    before, after = tensors(runs / "base"), tensors(runs / "stage1")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(TARGETS)
    losses = [line["loss"] for line in metrics(runs / "stage1")]
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage_trains_the_same_merged_weights(runs, stage):
    one, other = tensors(runs / "stage1"), tensors(runs / f"stage{stage}")
    for name, value in one.items():
        # float32 sums in another order, over eight steps
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
def test_resumed_they_equal_the_unbroken_run_to_the_bit(runs, stage):
    whole, halves = ([line["loss"] for line in metrics(runs / f"{name}{stage}")] for name in ("stage", "halves"))
    assert halves == whole
    one, other = tensors(runs / f"stage{stage}"), tensors(runs / f"halves{stage}")
    assert all(torch.equal(other[name], value) for name, value in one.items())
