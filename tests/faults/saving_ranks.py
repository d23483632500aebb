"""Two ranks that save without end are killed at random moments, again and again: `python saving_ranks.py FOLDER`.

They are forked from this process, which has imported everything and has no threads; starting anew each time would take
minutes.
"""

import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import Launch, quiet_deepspeed

quiet_deepspeed()

import deepspeed
import deepspeed.runtime.zero.muon.original_muon  # with torch._dynamo, which every engine imports: seconds in each fork
import torch

from recipes.training.checkpoint import CheckpointWriter, load_checkpoint
from recipes.training.checkpoint_files import (
    CheckpointError,
    TrainingState,
    clear_partial,
    list_checkpoints,
    verify_checksums,
    verify_sizes,
)
from recipes.training.engine import build_engine

KILLS = 40
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def start(launch: Launch, meeting: Path):
    """An engine of 200,000 parameters on a process group that meets in a file."""
    os.environ |= {"RANK": str(launch.rank), "LOCAL_RANK": str(launch.rank), "WORLD_SIZE": str(launch.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=launch.rank, world_size=launch.world_size
    )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 500)
    model.config = None  # only a model with AutoEP's blocks is asked for it
    return build_engine(model, DS_CONFIG, lambda step: 1.0)


def take_step(engine) -> None:
    """One optimizer step, so that each checkpoint differs from the one before."""
    engine.backward(engine(torch.ones(1, 400)).sum())
    engine.step()


def save_for_ever(
    rank: int, world_size: int, folder: Path, *, meeting: Path, first_step: int, background: bool, largest_file: int
):
    """Save after every step until killed; a save that fails as a whole is what a run would end with."""
    engine = start(Launch(rank, rank, world_size, world_size), meeting)
    state = TrainingState(step=first_step, world_size=world_size, zero_stage=1)
    found = folder / "checkpoints" / f"step_{first_step:08d}"
    if first_step:
        assert load_checkpoint(engine, found).step == first_step
    writer = CheckpointWriter(
        engine, folder / "checkpoints", {}, folder / "tokenizer", total_limit=2, background=background
    )
    (folder / f"ready_{rank}").touch()
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    while True:
        take_step(engine)
        state.step += 1
        writer.save(state)


def fork_rank(rank: int, **keywords) -> int:
    """Run one rank in a fork of this process; it ends with 1 where the save failed as it should, 3 at a surprise."""
    if pid := os.fork():
        return pid
    code = 3
    try:
        save_for_ever(rank, **keywords)
    except (CheckpointError, RuntimeError) as error:  # RuntimeError: the other rank is gone
        code = 1 if isinstance(error, CheckpointError) else 4
        sys.stderr.write(f"rank {rank}: {error}\n")
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def run_trials(folder: Path) -> None:
    """KILLS times: let two ranks save, kill one at a random moment, resume from what is there."""
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    checkpoints = folder / "checkpoints"
    generator = random.Random(0)
    newest, in_mid_save = 0, 0
    for trial in range(KILLS):
        for rank in range(2):
            (folder / f"ready_{rank}").unlink(missing_ok=True)
        full_disk = trial % 10 == 9
        pids = [
            fork_rank(
                rank,
                world_size=2,
                folder=folder,
                meeting=folder / f"meeting_{trial}",
                first_step=newest,
                background=trial % 2 == 1,
                largest_file=100_000 if full_disk and rank == trial // 10 % 2 else 0,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 60
        while not all((folder / f"ready_{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "the ranks never began to save"
            time.sleep(0.001)
        if full_disk:  # both must end by themselves
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            assert codes == [1, 1], codes
        else:
            time.sleep(generator.uniform(0, 0.4))
            os.kill(pids[trial % 2], signal.SIGKILL)
            in_mid_save += bool(list(checkpoints.glob("*.partial")))
            os.kill(pids[1 - trial % 2], signal.SIGKILL)  # as the launcher does once a rank is gone
            for pid in pids:
                os.waitpid(pid, 0)
        found = list_checkpoints(checkpoints)
        assert not newest or found, f"trial {trial}: nothing is left"
        for checkpoint in found:
            verify_sizes(checkpoint)
            verify_checksums(checkpoint)
        now = int(found[0].name[5:]) if found else 0
        assert now >= newest, f"trial {trial}: step {newest} was complete and is gone"
        print(f"trial {trial}: {'full disk' if full_disk else f'rank {trial % 2} killed'}, newest {now}", flush=True)
        newest = now
        if checkpoints.is_dir():
            clear_partial(checkpoints)
            assert [path.name for path in list_checkpoints(checkpoints)] == [path.name for path in found]
    print(f"{in_mid_save} of the kills left a folder half written")


if __name__ == "__main__":
    run_trials(Path(sys.argv[1]))
