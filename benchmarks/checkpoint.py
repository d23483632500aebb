"""What a checkpoint of the small preset costs: bytes, seconds, and how long training stands still.

    python benchmarks/checkpoint.py [--folder F] [--preset small] [--rounds 3]

After each save, the same disk takes (write and fsync) and gives as many bytes as one plain file. Each is deleted before
the next, so that all write to blocks that the disk has had before: a virtual disk is several times slower with others.
"""

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from model.config import load_model_config
from model.flops import count_parameters
from recipes.cluster.launch import Launch, quiet_deepspeed, start_process_group


def plain_file_seconds(path: Path, size: int) -> dict[str, float]:
    """Seconds to write `size` bytes with fsync, through the page cache and past it, and to read them back from disk."""
    block = mmap.mmap(-1, 1 << 24)  # begins with a page, as a direct write wants it
    block[:] = os.urandom(1 << 24)
    seconds = {}
    for name, flag in (("plain write", 0), ("plain write, direct", os.O_DIRECT)):
        path.unlink(missing_ok=True)
        begin = time.perf_counter()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | flag)
        for _ in range(size >> 24):
            os.write(file, block)
        os.fsync(file)
        os.close(file)
        seconds[name] = time.perf_counter() - begin
    drop_from_cache(path)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as plain:
        while plain.read(1 << 24):
            pass
    seconds["plain read"] = time.perf_counter() - begin
    return seconds


def drop_from_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Take one step, save at once and in the background, load again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    quiet_deepspeed()
    from recipes.training.checkpoint import CheckpointWriter, load_checkpoint
    from recipes.training.checkpoint_files import TrainingState, verify_checksums
    from recipes.training.engine import build_engine, build_model
    from recipes.training.initial_weights import draw_weights

    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    start_process_group(Launch(0, 0, 1, 1), ds_config)
    config = load_model_config(arguments.preset)
    model = build_model(config, ds_config)
    draw_weights(model, 0)
    engine = build_engine(model, ds_config, lambda step: 1.0)
    ids = torch.randint(0, config.vocab_size, (1, 64))
    engine.backward(engine(input_ids=ids, labels=ids)["loss"])
    engine.step()
    (folder / "tokenizer").mkdir()
    counts = count_parameters(config)
    print(f"{arguments.preset}: {counts.total + counts.mtp:,} parameters, bf16 with fp32 master weights and moments")
    measured: dict[str, list[float]] = {}
    for step in range(1, arguments.rounds + 2):  # the first makes the disk find its blocks, and does not count
        for name, background in (("at once", False), ("in the background", True)):
            writer = CheckpointWriter(
                engine, folder, config.to_dict(), folder / "tokenizer", total_limit=1, background=background
            )
            begin = time.perf_counter()
            stall = writer.save(TrainingState(step=step, world_size=1, zero_stage=1, dtype="bf16"))
            writer.finish()
            seconds = {name: time.perf_counter() - begin, f"{name}, standing still": stall}
            checkpoint = folder / f"step_{step:08d}"
            files = [path for path in checkpoint.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            for path in files:
                drop_from_cache(path)
            begin = time.perf_counter()
            verify_checksums(checkpoint)
            seconds["verify"] = time.perf_counter() - begin
            for path in files:
                drop_from_cache(path)
            begin = time.perf_counter()
            load_checkpoint(engine, checkpoint)
            seconds["load"] = time.perf_counter() - begin
            shutil.rmtree(checkpoint)
            seconds |= plain_file_seconds(folder / "plain", size)
            (folder / "plain").unlink()
            if step > 1:
                for key, value in seconds.items():
                    measured.setdefault(key, []).append(value)
    print(f"{size:,} bytes; medians and ranges over {arguments.rounds} rounds [s]")
    for key, values in measured.items():
        print(f"  {key:<34} {statistics.median(values):6.2f}   {min(values):.2f} to {max(values):.2f}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
