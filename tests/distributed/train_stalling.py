"""On two ranks, show the timeouts of every group that DeepSpeed makes, then let rank 1 stall, or stop it."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group


def sleep_instead_of_training() -> None:
    time.sleep(60)


if __name__ == "__main__":
    how, seconds = sys.argv[1], int(sys.argv[2])
    quiet_deepspeed()
    launch = read_launch()
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    }
    start_process_group(launch, config, timedelta(seconds=seconds))
    import deepspeed
    import torch
    from torch.distributed import distributed_c10d

    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    cpu = torch.device("cpu")
    timeouts = [group._get_backend(cpu).options._timeout.total_seconds() for group in distributed_c10d._world.pg_map]
    print(
        f"timeouts {timeouts} and of ZeRO {engine.optimizer.dp_process_group._get_backend(cpu).options._timeout}",
        flush=True,
    )

    def step() -> None:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()

    step()
    if how == "sleep":  # every rank alike is long away from collectives: nobody waits, so nobody stalls
        time.sleep(seconds + 1)
        step()
        print("nobody stalled", flush=True)
    if launch.rank == 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif launch.rank == 1:
        sleep_instead_of_training()
    step()
    stop_process_group()
