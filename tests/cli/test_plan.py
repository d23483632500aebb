"""The plan command: a table, a recommendation with its reasons, a picture; wrong input is one clear message."""

import json

import pytest

from recipes.config.errors import UserError
from recipes.plan import main


def run(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def result(capsys, *words):
    return json.loads(run(capsys, *words, "--json", "true").splitlines()[-1])


def test_v2_lite_on_one_node(capsys):
    answer = result(capsys, "--model", "v2_lite", "--gpus", "8")
    plans = {plan["ds_config"]: plan for plan in answer["plans"]}
    # 15,706,484,224 parameters: 2 bytes each; fp32 gradients and 12 bytes of optimizer over 8 ranks
    zero2 = plans["8gpu_zero2_bf16"]
    assert zero2["weights_bytes"] == pytest.approx(2 * 15_706_484_224, rel=1e-6)
    assert zero2["gradients_bytes"] == pytest.approx(4 * 15_706_484_224 / 8, rel=1e-6)
    assert zero2["optimizer_bytes"] == pytest.approx(12 * 15_706_484_224 / 8, rel=1e-6)
    assert not plans["8gpu_zero1_bf16"]["fits"] and zero2["fits"]
    assert answer["recommended"].startswith("8gpu_zero") and answer["recommended"].endswith("bf16")
    activations = zero2["activations_bytes"]
    assert activations["none"] > activations["selective"] > activations["full"]


def test_every_loser_has_a_reason(capsys):
    text = run(capsys, "--model", "v2_lite", "--gpus", "8")
    table = [line.split()[0] for line in text.splitlines() if line.startswith(("1gpu", "8gpu"))]
    recommended = text.split("recommended: ")[1].split()[0]
    reasons = dict(line.strip().split(": ", 1) for line in text.split("recommended:")[1].splitlines()[1:])
    assert set(reasons) == set(table) - {recommended}
    assert "needs" in reasons["8gpu_zero1_bf16"] and "gradients" in reasons["8gpu_zero1_bf16"]


def test_v3_on_its_own_cluster(capsys):
    answer = result(capsys, "--model", "v3", "--gpus", "2048", "--gpu_memory", "80", "--train_tokens", "14800000000000")
    assert answer["recommended"] == "2048gpu_ep128_bf16"
    plan = next(plan for plan in answer["plans"] if plan["ds_config"] == "2048gpu_ep128_bf16")
    seconds = 6144 * 4096 / plan["step_seconds"]  # tokens a second of the whole cluster
    assert plan["days"] == pytest.approx(14.8e12 / seconds / 86400, rel=1e-6)


def test_a_model_that_fits_nowhere(capsys):
    text = run(capsys, "--model", "v3", "--gpus", "8")
    assert "none of them fits" in text


def test_recomputation_goes_up_until_it_fits(capsys):
    words = ("--model", "v2_lite", "--gpus", "8", "--deepspeed_config", "ds_configs/8gpu_zero2_bf16.json")
    small, large = (result(capsys, *words, "--gpu_memory", memory)["plans"][0] for memory in ("80", "200"))
    assert large["gradient_checkpointing"] == "none" and small["gradient_checkpointing"] == "full"
    assert small["fits"] and large["fits"]


def test_the_files_batch_is_brought_to_the_ranks(capsys):
    plan = result(capsys, "--model", "v2_lite", "--gpus", "24")["plans"][0]
    assert plan["tokens_per_step"] == 264 * 4096  # 256 is no multiple of 24; 264 is


def test_a_hostfile_counts_the_gpus(capsys, tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("# two nodes\nworker-1 slots=8\nworker-2 slots=8\n")
    assert result(capsys, "--model", "tiny", "--hostfile", str(hosts))["gpus"] == 16


def test_a_picture_of_each_presets_schedule(capsys, tmp_path):
    picture = tmp_path / "v3.png"
    text = run(capsys, "--config", "recipes/presets/v3_scaled.yaml", "--plot_schedule", str(picture))
    assert "deepseek_v3" in text and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus", "0"], "--gpus 0: must be above 0"),
        (["--gpus", "eight"], "invalid int value"),
        (["--gpu", "8"], "unknown flag --gpu"),
        (["--model", "v4"], "--model v4"),
        (["--hostfile", "/nowhere"], "--hostfile /nowhere: cannot be read"),
        (["--deepspeed_config", "nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_input(words, message):
    with pytest.raises(UserError) as error:
        main(words)
    assert message in str(error.value)


def test_bad_hostfile_and_both_sizes(tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("worker-1 slot=8\n")
    with pytest.raises(UserError, match="--hostfile"):
        main(["--hostfile", str(hosts)])
    with pytest.raises(UserError, match="give one"):
        main(["--hostfile", str(hosts), "--gpus", "8"])


def test_the_micro_batch_goes_down_until_it_fits(capsys):
    words = ("--model", "v2", "--gpus", "256", "--deepspeed_config", "ds_configs/64gpu_zero3_bf16.json")
    small, large = (result(capsys, *words, "--gpu_memory", memory)["plans"][0] for memory in ("36", "400"))
    assert small["fits"] and large["fits"]
    assert small["micro_batch_size"] < large["micro_batch_size"]
    assert small["micro_batch_size"] * small["gradient_accumulation_steps"] == 512 / 256
