"""--torch_compile is refused where it cannot work, before anything starts."""

from types import SimpleNamespace

import pytest

from recipes.cluster.launch import read_launch
from recipes.config.errors import UserError
from recipes.config.run_config import parse_pretrain_config
from recipes.training import plan_run


def fault_of(small_model, small_corpus, folder, *more):
    words = f"--model {small_model} --data {small_corpus} --max_steps 2 --seq_length 32 --global_batch_size 4".split()
    words += ["--output_dir", str(folder), "--deepspeed_config", "ds_configs/cpu.json", "--torch_compile", *more]
    with pytest.raises(UserError) as raised:
        plan_run.plan_run(parse_pretrain_config(words), read_launch())
    return raised.value.faults


def test_without_a_compiler(small_model, small_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_run, "has_compiler", lambda: False)
    (fault,) = fault_of(small_model, small_corpus, tmp_path / "run")
    assert fault.startswith("--torch_compile: needs a C++ compiler")


def test_with_expert_parallelism(small_model, small_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_run, "has_compiler", lambda: True)
    settings = ["--set", "expert_parallel.enabled=true", "expert_parallel.autoep_size=1"]
    (fault,) = fault_of(small_model, small_corpus, tmp_path / "run", *settings)
    assert fault.startswith("--torch_compile: with expert_parallel")


@pytest.mark.parametrize(("dtype", "refused"), [("fp16", True), ("bf16", False)])
def test_on_a_gpu_in_half_precision(monkeypatch, dtype, refused):
    monkeypatch.setattr(plan_run, "has_compiler", lambda: True)
    model = SimpleNamespace(n_routed_experts=8)
    plan = SimpleNamespace(autoep_size=0, device_type="cuda", model=model, dtype=dtype)
    if not refused:
        plan_run._check_compiles(plan)
        return
    with pytest.raises(UserError) as raised:
        plan_run._check_compiles(plan)
    assert raised.value.faults[0].startswith("--torch_compile: in fp16 on a GPU")
