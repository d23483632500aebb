"""On two ranks, change one value of one parameter on rank 1 and print what the check says."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group


def refuse(*_, **__):
    raise AssertionError("a collective of tensors: NCCL would refuse these, which are in host memory")


if __name__ == "__main__":
    quiet_deepspeed()
    launch = read_launch()
    start_process_group(launch, {})
    from model.config import load_model_config
    from model.transformer import DeepseekForCausalLM
    from recipes.config.errors import TrainingFault
    from recipes.training.initial_weights import check_same_on_every_rank, draw_weights

    model = DeepseekForCausalLM(load_model_config(sys.argv[1]))
    draw_weights(model, seed=3)
    for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast"):
        setattr(torch.distributed, name, refuse)
    check_same_on_every_rank(model)
    if launch.rank == 1:
        weight = model.model.layers[1].mlp.experts.down_proj.data
        weight[0, 0, 0], weight[0, 0, 1] = weight[0, 0, 1].clone(), weight[0, 0, 0].clone()  # same values, other places
    try:
        check_same_on_every_rank(model)
    except TrainingFault as fault:
        print(fault)
    stop_process_group()
