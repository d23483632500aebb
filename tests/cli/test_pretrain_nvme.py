"""Offload to NVMe without libaio is refused in one line, before anything starts."""

import pytest

from recipes.cluster.launch import read_launch
from recipes.config.errors import UserError
from recipes.config.run_config import parse_pretrain_config
from recipes.training import plan_run


def test_without_libaio(small_model, small_corpus, tmp_path, monkeypatch):
    words = f"--model {small_model} --data {small_corpus} --max_steps 2 --seq_length 32 --global_batch_size 4".split()
    words += ["--output_dir", str(tmp_path / "run"), "--deepspeed_config", "ds_configs/cpu.json", "--set"]
    words += ["zero_optimization.stage=3", "zero_optimization.offload_optimizer.device=nvme"]
    words += [f"zero_optimization.offload_optimizer.nvme_path={tmp_path}"]
    monkeypatch.setattr(plan_run, "has_compiler", lambda: True)
    monkeypatch.setattr(plan_run, "has_libaio", lambda: False)
    with pytest.raises(UserError) as raised:
        plan_run.plan_run(parse_pretrain_config(words), read_launch())
    (fault,) = raised.value.faults
    assert 'offload_optimizer.device: "nvme"' in fault and "install libaio-dev" in fault
    monkeypatch.setattr(plan_run, "has_libaio", lambda: True)
    plan = plan_run.plan_run(parse_pretrain_config(words), read_launch())
    assert plan.zero_stage == 3 and not (tmp_path / "run").exists()
