"""An exponential moving average of the weights, kept in the CPU's memory, each parameter by one rank.

    RUN/moving_average/step_00000012/part_00000.safetensors ...   beside the checkpoint of the same step

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.3: an average in CPU memory, to see early how the model does after
the learning rate has decayed.
"""

import functools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.hf_weights import parts_of_state
from recipes.config.errors import UserError
from recipes.training.checkpoint_files import checkpoint_name, checkpoints_folder, list_checkpoints
from recipes.training.trained_model import TrainedWeights

FOLDER = "moving_average"
DEFAULT_STEPS = 10


class MovingAverage:
    """average <- decay ** k * average + (1 - decay ** k) * weights, every k steps, from the weights at its start.

    Args:
        engine: the DeepSpeed engine; its fp32 weights are gathered, one parameter at a time, at each update.
        decay: per optimizer step. every: k [steps], 10 if None.
        run: the run's folder. step: of the engine's weights; an average saved at that step is taken up again.
    """

    def __init__(self, engine: Any, *, decay: float, every: int | None, run: Path, step: int) -> None:
        self.engine, self.decay, self.every, self.run = engine, decay, every or DEFAULT_STEPS, run
        self.rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.owners = share_out({name: _size(p) for name, p in engine.module.named_parameters()}, ranks)
        self.tensors: dict[str, Tensor] = {}
        self.go_on_from(step)

    def go_on_from(self, step: int) -> None:
        """Take up the average saved at a step, or else the engine's weights, of that step; all ranks call it."""
        saved = FolderTensors(self.run / FOLDER / checkpoint_name(step))
        if step and not saved and self.rank == 0:
            print(f"no moving average of step {step} in {self.run}: it begins from the weights there", flush=True)
        for name, weight in self._weights():
            if self.owners[name] == self.rank:
                self.tensors[name] = saved[name] if name in saved else weight.clone()

    def update(self, step: int) -> None:
        """After step `step` was applied; all ranks call it."""
        if step % self.every:
            return
        for name, weight in self._weights():
            if name in self.tensors:
                self.tensors[name].lerp_(weight, 1 - self.decay**self.every)

    @torch.no_grad()
    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter whole, in fp32 on the CPU where this rank keeps it, else empty; all ranks go through it."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.engine.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter)
            if whole is None:  # fp32 at ZeRO stage 0: the parameter is its own master copy
                whole = parameter.detach()
            yield name, whole.float().cpu() if self.owners[name] == self.rank else torch.empty(0)

    def save(self, step: int) -> None:
        """Write all parts aside, then give them their name; all ranks call it. Those without a checkpoint go."""
        target = self.run / FOLDER / checkpoint_name(step)
        aside = target.with_name(target.name + ".partial")
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        torch.distributed.barrier()
        parts = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        if self.rank == 0:  # the balancing biases belong to the weights; they are small steps already
            parts |= {name: buffer.detach().cpu() for name, buffer in self.engine.module.named_buffers()}
        save_file(parts, aside / f"part_{self.rank:05d}.safetensors")
        torch.distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            kept = [path.name for path in list_checkpoints(checkpoints_folder(self.run))]
            for path in target.parent.iterdir():
                if path.name not in kept and path.name < max(kept, default=""):  # a later one may still be written
                    shutil.rmtree(path)


def share_out(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Which rank keeps which parameter: the largest first, each to the rank with the least so far."""
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _size(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 leaves an empty tensor in its place


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors files, read when asked for; none where there is no such folder."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def open_moving_average(run: str | Path) -> TrainedWeights:
    """The newest moving average of a run, as weights to export or evaluate.

    Raises:
        UserError: the run kept none.
    """
    folder = Path(run).expanduser()
    for checkpoint in list_checkpoints(checkpoints_folder(folder)):
        state = FolderTensors(folder / FOLDER / checkpoint.name)
        if state:
            config = ModelConfig.from_file(checkpoint / "config.json")
            return TrainedWeights(config, functools.partial(parts_of_state, state), checkpoint / "tokenizer")
    raise UserError(f"{run}: kept no moving average; give the folder of a run that was trained with --ema_decay")
