"""Every file of ds_configs/: it resolves, DeepSpeed takes it without a word, and the README is right about it."""

import json
import logging
import math
import re
import warnings
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger

from model.config import load_model_config
from recipes.cluster.memory import model_state_bytes
from recipes.config.ds_check import precision, zero_stage
from recipes.config.ds_config import DS_CONFIGS, RunFacts, load_ds_config, resolve_ds_config

FILES = sorted(path.stem for path in DS_CONFIGS.glob("*.json"))
REQUIRED = """cpu cpu_bf16 1gpu_fp16 1gpu_bf16 1gpu_offload_bf16 8gpu_zero1_fp16 8gpu_zero1_bf16 8gpu_zero2_fp16
8gpu_zero2_bf16 8gpu_zero3_fp16 8gpu_zero3_bf16 32gpu_zero2_bf16 64gpu_zero3_bf16 256gpu_ep32_bf16
2048gpu_ep128_bf16""".split()


def ranks_of(name):
    return 1 if name.startswith("cpu") else int(name.split("gpu")[0])


def resolve(name):
    model = {"256gpu_ep32_bf16": "v2", "2048gpu_ep128_bf16": "v3"}.get(name, "v2_lite")
    facts = RunFacts(
        world_size=ranks_of(name),
        device_type="cpu" if name.startswith("cpu") else "cuda",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=load_model_config(model),
        seq_length=4096,
        max_steps=10_000,
        output_dir=Path("runs/x"),
    )
    return resolve_ds_config(load_ds_config(DS_CONFIGS / f"{name}.json"), source=name, facts=facts)


def test_the_files_are_all_there():
    assert sorted(REQUIRED) == FILES


@pytest.mark.parametrize("name", FILES)
def test_deepspeed_takes_it_without_a_warning(name):
    resolved = resolve(name).config
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # no process group tells the class how many ranks there are; the file's batch is for all of them
            taken = DeepSpeedConfig({key: value for key, value in resolved.items() if key != "train_batch_size"})
    finally:
        logger.removeHandler(handler)
    assert not records, [record.getMessage() for record in records]
    assert (
        taken.train_micro_batch_size_per_gpu * taken.gradient_accumulation_steps * ranks_of(name)
        == (resolved["train_batch_size"])
    )
    assert '"auto"' not in json.dumps({key: value for key, value in resolved.items() if key != "recipe"})


@pytest.mark.parametrize("name", FILES)
def test_it_is_what_its_name_says(name):
    config = resolve(name).config
    if name != "cpu":
        assert precision(config) == name.rsplit("_", 1)[1]
    if stage := re.search(r"zero(\d)", name):
        assert zero_stage(config) == int(stage[1])
    if size := re.search(r"ep(\d+)", name):
        assert config["expert_parallel"]["autoep_size"] == int(size[1])
    if precision(config) == "fp16":
        scale = config["fp16"]
        assert (scale["loss_scale"], scale["initial_scale_power"], scale["loss_scale_window"]) == (0, 16, 1000)
        assert (scale["hysteresis"], scale["min_loss_scale"]) == (2, 1)
    assert config["gradient_clipping"] == 1.0  # V3 sec. 4.2
    params = config["optimizer"]["params"]
    assert params["betas"] == [0.9, 0.95] and params["weight_decay"] == 0.1  # V3 sec. 4.2
    assert config["tensorboard"]["enabled"]


def readme_rows():
    rows = {}
    for line in (DS_CONFIGS / "README.md").read_text().splitlines():
        if match := re.match(r"\| `(\S+)\.json` \|", line):
            rows[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return rows


def test_the_readme_has_a_row_for_each_file():
    assert sorted(readme_rows()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_the_readmes_row(name):
    _, _, stage, dtype, memory, recomputes, _ = readme_rows()[name]
    resolved = resolve(name)
    assert int(stage[0]) == zero_stage(resolved.config) and dtype.split(",")[0] == precision(resolved.config)
    assert ("fp32 gradients" in dtype) == (resolved.config.get("data_types", {}).get("grad_accum_dtype") == "fp32")
    assert (recomputes == "yes") == (resolved.gradient_checkpointing == "full")
    if "plan.py" in memory:
        return
    # many equal parameters, so that none is large beside a rank's part
    groups = [[(f"p{i}", 1_000_000) for i in range(1000)]]
    stated = [float(number) for number in re.findall(r"[\d.]+", memory)]
    if "/ ranks" in memory:
        whole, shared, *alone = stated
        for ranks in (1, 2):
            state = model_state_bytes(groups, resolved.config, ranks)
            expected = alone[0] if alone and ranks == 1 else whole + shared / ranks
            assert (state.weights + state.gradients + state.optimizer) / 1e9 == expected
        return
    state = model_state_bytes(groups, resolved.config, ranks_of(name))
    per_billion = (state.weights + state.gradients + state.optimizer) / 1e9
    assert per_billion == pytest.approx(stated[0], abs=0.03)
    if len(stated) > 1:
        assert state.host / 1e9 == pytest.approx(stated[1], abs=0.03)


def test_the_two_large_files_give_the_papers_rates():
    # V3: 2.2e-4 at 15,360 sequences; V2: 2.4e-4 at 9,216; the file's rate holds at 256
    for name, batch, rate in (("2048gpu_ep128_bf16", 15360, 2.2e-4), ("256gpu_ep32_bf16", 9216, 2.4e-4)):
        lr = load_ds_config(DS_CONFIGS / f"{name}.json")["optimizer"]["params"]["lr"]
        assert lr * math.sqrt(batch / 256) == pytest.approx(rate, rel=1e-3)
