"""The moving average of the weights, at several ZeRO stages and ranks, against one worked out from the checkpoints."""

import json

import pytest
import torch
from launching import run_ranks

from recipes.config.errors import UserError
from recipes.config.run_config import parse_pretrain_config
from recipes.training.moving_average import FolderTensors, open_moving_average, share_out
from recipes.training.trained_model import open_weights

DECAY, STEPS = 0.7, 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_corpus, small_model):
    """On two ranks: `stage1`, `stage3` in halves, and `stage0`, updated every second step."""
    folder = tmp_path_factory.mktemp("averages")

    def words(name, stage, steps, *more):
        shared = f"--model {small_model} --data {small_corpus} --seq_length 32 --global_batch_size 4 --save_steps 1"
        shared += (
            f" --save_total_limit 0 --ema_decay {DECAY} --deepspeed_config ds_configs/cpu.json --max_steps {steps}"
        )
        constant = ['scheduler={"type":"constant"}', f"zero_optimization.stage={stage}"]
        return [*shared.split(), "--set", *constant, "--output_dir", str(folder / name), *more]

    every = ["--ema_steps", "1"]
    arguments = [words("stage1", 1, STEPS, *every), words("stage3", 3, 2, *every), words("stage3", 3, STEPS, *every)]
    arguments.append(words("stage0", 0, STEPS, "--ema_steps", "2"))
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps(arguments))
    run_ranks(["tests/distributed/train_runs.py", str(jobs)], ranks=2)
    return folder


def parameters(weights, config):
    """name of the file's tensor -> value, without the balancing biases, which are not averaged."""
    from model.hf_layout import file_parts

    source = weights.source(config)
    return {
        part.file_name: source(part).double().clone()
        for part in file_parts(config)
        if not part.name.endswith("e_score_correction_bias")
    }


def drawn(config):
    """The weights before the first step."""
    from model.hf_weights import parts_of_state
    from model.transformer import DeepseekForCausalLM
    from recipes.training.trained_model import TrainedWeights

    model = DeepseekForCausalLM(config)
    model.init_weights(parse_pretrain_config([]).seed)
    state = model.state_dict()
    return parameters(TrainedWeights(config, lambda wanted: parts_of_state(state, wanted), None), config)


@pytest.mark.parametrize(("name", "every"), [("stage1", 1), ("stage3", 1), ("stage0", 2)])
def test_it_is_the_average_of_the_weights_at_each_update(runs, name, every):
    checkpoints = [runs / name / "checkpoints" / f"step_{step:08d}" for step in range(every, STEPS + 1, every)]
    config = open_weights(checkpoints[0]).config
    expected = drawn(config)
    for checkpoint in checkpoints:
        for key, weight in parameters(open_weights(checkpoint), config).items():
            expected[key] += (1 - DECAY**every) * (weight - expected[key])
    found = parameters(open_moving_average(runs / name), config)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        # float32 against float64, a few additions
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-7, msg=key)
    moved = parameters(open_weights(checkpoints[-1]), config)
    assert any(not torch.allclose(moved[key], expected[key], atol=1e-5) for key in moved), "nothing was averaged"


def test_the_balancing_biases_are_the_newest_ones(runs):
    biases = torch.load(runs / "stage1" / "checkpoints" / f"step_{STEPS:08d}" / "buffers.pt", weights_only=True)
    saved = FolderTensors(runs / "stage1" / "moving_average" / f"step_{STEPS:08d}")
    names = [name for name in biases if name.endswith("e_score_correction_bias")]
    assert names and all(torch.equal(saved[name], biases[name]) for name in names)


def test_each_rank_keeps_about_as_much():
    owners = share_out({"a": 8, "b": 5, "c": 4, "d": 3, "e": 2}, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}  # 8 + 3 and 5 + 4 + 2


def test_a_run_without_one_and_values_out_of_range_are_named(runs):
    with pytest.raises(UserError, match="kept no moving average"):
        open_moving_average(runs)
    for words, fault in (
        (["--ema_decay", "1"], "--ema_decay 1.0"),
        (["--ema_steps", "2"], "--ema_steps 2: there is no"),
    ):
        with pytest.raises(UserError, match=fault):
            parse_pretrain_config(words)
