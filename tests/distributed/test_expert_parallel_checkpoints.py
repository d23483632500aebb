"""A checkpoint saved under expert parallelism goes on with other or without shared-out experts, and is exported."""

import json
import shutil

import pytest
import torch
from launching import metrics, run_python, run_ranks

from model.transformer import DeepseekForCausalLM
from recipes.training.trained_model import load_trained_model, open_weights

LAST = 10
RESUMED = {  # name -> ranks, autoep_size (0: off), ZeRO stage; saved by 2 ranks, autoep_size 2, stage 1
    "off": (1, 0, 1),
    "ep1": (1, 1, 2),
    "ep4_zero3": (4, 4, 3),
}


def flags(folder, model, corpus, size, stage):
    settings = [f"zero_optimization.stage={stage}", "train_micro_batch_size_per_gpu=1"]
    settings += ["expert_parallel.enabled=true", f"expert_parallel.autoep_size={size}"] if size else []
    words = f"--model {model} --data {corpus} --max_steps {LAST} --seq_length 32 --global_batch_size 8 --save_steps 5"
    words += f" --save_total_limit 0 --deepspeed_config ds_configs/cpu.json --output_dir {folder} --set"
    return [*words.split(), *settings]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_model, small_corpus):
    folder = tmp_path_factory.mktemp("kinds")

    def go(ranks, *arguments):
        listing = folder / "runs.json"
        listing.write_text(json.dumps(arguments))
        run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)

    go(2, flags(folder / "unbroken", small_model, small_corpus, 2, 1))
    for name in RESUMED:
        shutil.copytree(folder / "unbroken", folder / name)
        shutil.rmtree(folder / name / "checkpoints" / f"step_{LAST:08d}")
    for ranks in (1, 4):
        todo = [(name, size, stage) for name, (r, size, stage) in RESUMED.items() if r == ranks]
        go(ranks, *(flags(folder / name, small_model, small_corpus, size, stage) for name, size, stage in todo))
    return folder


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_as_if_unbroken(runs, name):
    for ours, theirs in zip(metrics(runs / name), metrics(runs / "unbroken"), strict=True):
        # moments that were lost, or another step of Adam's, would show in the third digit
        for key in ("loss", "mtp_loss", "balance_loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
        assert ours["expert_load"] == theirs["expert_load"], ours["step"]


@pytest.mark.parametrize("name", ["unbroken", "ep4_zero3"])
def test_export_reads_it(runs, name, tmp_path):
    exported = tmp_path / "exported"
    assert run_python(["recipes/export.py", str(runs / name), str(exported)]).code == 0
    models: list[DeepseekForCausalLM] = [
        load_trained_model(open_weights(path), device="cpu", dtype=torch.float32) for path in (exported, runs / "off")
    ]
    for (key, ours), theirs in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
