"""Combinations that DeepSpeed ignores or gets wrong: each is a fault, all in one report."""

import copy
import json
from types import SimpleNamespace

import pytest

from recipes.config.ds_config import RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.config.errors import UserError

GOOD = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "cosine", "params": {"warmup_num_steps": 10}},
}


def facts(**changes):
    values = dict(
        world_size=2,
        device_type="cuda",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=SimpleNamespace(
            hidden_size=64,
            n_routed_experts=8,
            num_attention_heads=4,
            first_k_dense_replace=1,
            intermediate_size=96,
            moe_intermediate_size=32,
            n_shared_experts=1,
        ),
        seq_length=128,
        max_steps=100,
    )
    return RunFacts(**(values | changes))


def resolve(config, **fact_changes):
    return resolve_ds_config(config, source="f.json", facts=facts(**fact_changes))


def faults_of(overrides=(), remove=(), **fact_changes):
    config = apply_overrides(GOOD, list(overrides))
    for key in remove:
        *parents, last = key.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        del section[last]
    try:
        resolve(config, **fact_changes)
    except UserError as error:
        return error.faults
    return []


def test_the_good_file_has_no_fault():
    assert faults_of() == []


CASES = [
    # overrides, facts -> how the only fault begins, and a word of the way out
    (["fp16.enabled=true", "bf16.enabled=true"], {}, "fp16.enabled", 'write "enabled": false in the other'),
    (["fp16.enabled=true", "zero_optimization.stage=0"], {}, "fp16.enabled", "write stage 1"),
    (["bf16.enabled=true", "zero_optimization.stage=0"], {}, "bf16.enabled", "write stage 1"),
    (["bf16.enabled=true", "bf16.check_grad_overflow=false"], {}, "bf16.check_grad_overflow", "write true"),
    (["bf16.enabled=true"], {"device_dtypes": ("fp32", "fp16")}, "bf16.enabled", "computes only in fp16, fp32"),
    (["fp16.enabled=true"], {"device_dtypes": ("fp32", "bf16")}, "fp16.enabled", "computes only in bf16, fp32"),
    (['torch_autocast={"enabled":true,"dtype":"float16"}'], {}, "torch_autocast.dtype", 'write "bfloat16"'),
    (["bf16.enabled=true", 'torch_autocast={"enabled":true,"dtype":"bfloat16"}'], {}, "torch_autocast.enabled", "one"),
    (["optimizer.type=Muon"], {}, "gradient_clipping", "write 0.0"),
    (["gradient_clipping=-1"], {}, "gradient_clipping", "at least 0"),
    (["gradient_clipping=null"], {}, "gradient_clipping: missing", "write 1.0"),
    (
        ["optimizer.type=Muon", "gradient_clipping=0.0", "zero_optimization.stage=3"],
        {}, "zero_optimization.reduce_scatter", "write false",
    ),
    (
        ["optimizer.type=Muon", "gradient_clipping=0.0", "bf16.enabled=true", "data_types.grad_accum_dtype=fp32"],
        {}, "zero_optimization.stage", "write stage 2",
    ),
    (["zero_optimization.offload_optimizer.device=cpu"], {"compiler_available": False},
     "zero_optimization.offload_optimizer.device", "cpu_adam"),
    (["optimizer.params.torch_adam=false"], {"device_type": "cuda", "nvcc_available": False},
     "optimizer.params.torch_adam", 'write true or "auto"'),
    (["zero_optimization.offload_optimizer.device=cpu", "zero_optimization.stage=0"], {},
     "zero_optimization.offload_optimizer", "stage 1, 2 or 3"),
    (["zero_optimization.offload_param.device=cpu"], {}, "zero_optimization.offload_param", "stage 3 only"),
    (
        ["zero_optimization.stage=3", 'zero_optimization.offload_param={"device":"nvme","nvme_path":"/n"}'], {},
        "zero_optimization.offload_param.device", "async_io",
    ),
    (
        ["optimizer.params.torch_adam=true", "zero_optimization.stage=3",
         'zero_optimization.offload_param={"device":"nvme","nvme_path":"/n"}'],
        {"async_io_available": True, "device_type": "cuda", "nvcc_available": False},
        "zero_optimization.offload_param.device", "no nvcc",
    ),
    (
        ['zero_optimization.offload_optimizer={"device":"nvme","nvme_path":"/n"}'], {"async_io_available": True},
        'zero_optimization.offload_optimizer.device: "nvme" at stage', "write stage 3",
    ),
    (["expert_parallel.enabled=true", "expert_parallel.autoep_size=3"], {"world_size": 6, "global_batch_size": 12},
     "expert_parallel.autoep_size: 3 does not divide the model's 8", "write 1 or 2"),
    (["expert_parallel.enabled=true", "expert_parallel.autoep_size=4"], {},
     "expert_parallel.autoep_size: 4 does not divide the 2 ranks", "write 1 or 2"),
    (["expert_parallel.enabled=true", "expert_parallel.autoep_size=2", "expert_parallel.load_balance_coeff=0.1"], {},
     "expert_parallel", "load_balance_coeff"),
    (["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"],
     {"model": SimpleNamespace(hidden_size=64, n_routed_experts=None)}, "expert_parallel.enabled", "no routed experts"),
    (["scheduler.params.warmup_num_steps=101"], {}, "scheduler.params.warmup_num_steps", "longer than the run of 100"),
    (["optimizer.type=AdmaW"], {}, "optimizer.type", 'did you mean "AdamW"?'),
    (["optimizer.params.weigth_decay=0.1"], {}, "optimizer.params.weigth_decay", 'did you mean "weight_decay"?'),
    (["optimizer.params.max_grad_norm=1"], {}, "optimizer.params.max_grad_norm", "gradient_clipping"),
    (["optimizer.params.lr=-1"], {}, "optimizer.params.lr", "above 0"),
    (["optimizer.params.betas=[0.9,1.0]"], {}, "optimizer.params.betas", "below 1"),
    (["optimizer.params.weight_decay=-0.1"], {}, "optimizer.params.weight_decay", "at least 0"),
    (["zero_optimization.stage=4"], {}, "zero_optimization.stage", "Input should be 0, 1, 2"),
    (["zero_optimization.reduce_bucket_size=0"], {}, "zero_optimization.reduce_bucket_size", "greater than 0"),
    (['fp16={"enabled":true,"loss_scale_window":0}'], {}, "fp16", "loss_scale_window must be > 0"),
    (["communication_data_type=fp8"], {}, "communication_data_type", "'fp16', 'bf16', 'fp32'"),
    (["gradient_allreduce_op=max"], {}, "gradient_allreduce_op", "mean"),
    (["bfloat16.enabled=true"], {}, "bfloat16", 'write "bf16"'),
    (["zero_optimization.allgather_bucket_size=auto"], {}, "zero_optimization.allgather_bucket_size", "nobody"),
    (["tensorboard.output_path=auto"], {}, "tensorboard.output_path", "nobody"),
    (["data_efficiency.enabled=true"], {}, "data_efficiency.enabled", "own loader"),
    (["activation_checkpointing.cpu_checkpointing=true"], {}, "activation_checkpointing.cpu_checkpointing", "false"),
    (["train_batch_size=9"], {}, "train_batch_size 9", "write 8 or 10"),
    (["elasticity={}"], {}, "elasticity: DeepSpeed removed it", "delete it"),
    (["sparse_attention={}"], {}, "sparse_attention: DeepSpeed removed it", "delete it"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, fact_changes, start, way_out", CASES, ids=lambda value: str(value)[:60])
def test_one_wrong_thing_is_one_fault(overrides, fact_changes, start, way_out):
    (fault,) = faults_of(overrides, **fact_changes)
    assert fault.startswith(f"f.json: {start}"), fault
    assert way_out in fault


def test_a_missing_learning_rate_and_a_missing_optimizer():
    (fault,) = faults_of(remove=["optimizer.params.lr"])
    assert fault.startswith("f.json: optimizer.params.lr: missing")
    (fault,) = faults_of(remove=["optimizer"])
    assert fault == 'f.json: optimizer.type: missing; write "AdamW"'


def test_muon_and_offload_are_taken_where_they_work():
    assert faults_of(["optimizer.type=Muon", "gradient_clipping=0.0"]) == []
    assert faults_of(["zero_optimization.offload_optimizer.device=cpu"]) == []
    assert faults_of(["torch_autocast.enabled=true", "torch_autocast.dtype=float16", "gradient_clipping=0.0"]) == []
    assert faults_of(["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"]) == []
    # a section that DeepSpeed takes only together with another one
    assert faults_of(["bf16.enabled=true", "bf16.bf16_master_weights_and_grads=true"]) == []


def test_eight_faults_come_in_one_report(tmp_path):
    wrong = copy.deepcopy(GOOD)
    wrong["zero_optimisation"] = {"stage": 2}
    wrong["zero_optimization"] = {"stage": 0, "reduce_scater": True}
    wrong["fp16"] = {"enabled": True}
    wrong["train_batch_size"] = 9
    del wrong["gradient_clipping"]
    wrong["optimizer"]["params"]["lerning_rate"] = 1e-4
    wrong["scheduler"]["params"]["warmup_num_steps"] = 5000
    wrong["elasticity"] = {"enabled": True}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(UserError) as error:
        resolve_ds_config(load_ds_config(path), source="wrong.json", facts=facts())
    starts = [fault.split(": ")[1] for fault in error.value.faults]
    assert sorted(starts) == sorted(
        [
            "zero_optimisation",
            "zero_optimization.reduce_scater",
            "fp16.enabled",
            "train_batch_size 9",
            "gradient_clipping",
            "optimizer.params.lerning_rate",
            "scheduler.params.warmup_num_steps",
            "elasticity",
        ]
    )
    assert all("\n" not in fault and fault.startswith("wrong.json: ") for fault in error.value.faults)
