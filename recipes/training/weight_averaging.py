"""The average of a run's last checkpoints: smoother weights than any one of them, without training again."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf_layout import FilePart
from recipes.config.errors import UserError
from recipes.training.checkpoint_files import checkpoints_folder, list_checkpoints, read_state
from recipes.training.trained_model import TrainedWeights, open_weights


def open_average(run: str | Path, last: int, decay: float | None = None) -> TrainedWeights:
    """The average of the last checkpoints of a run, as weights to export, evaluate or begin with.

    Args:
        run: a run's folder.
        last: how many, from the newest back; they must be kept: --save_total_limit says how many are.
        decay: weigh a checkpoint by decay ** (steps before the newest): an exponential moving average over steps, as
            far as the checkpoints go; None: all alike.
    Raises:
        UserError: fewer checkpoints than that, or a decay outside (0, 1).
    Source: stochastic weight averaging, Izmailov et al. (arXiv 1803.05407); V3 sec. 3.2.3 keeps an exponential moving
        average of the weights to see early what a decayed learning rate would give.
    """
    if last < 2:
        raise UserError(f"--average_last {last}: at least 2 checkpoints make an average")
    if decay is not None and not 0 < decay < 1:
        raise UserError(f"--average_decay {decay}: must be above 0 and below 1")
    found = list_checkpoints(checkpoints_folder(Path(run).expanduser()))
    if len(found) < last:
        raise UserError(
            f"{run}: has {len(found)} complete checkpoints, {last} are to be averaged; give a run's folder, and train "
            "with --save_total_limit 0 to keep them all"
        )
    newest_step = read_state(found[0]).step
    shares = [1.0 if decay is None else decay ** (newest_step - read_state(path).step) for path in found[:last]]
    return average([open_weights(path) for path in found[:last]], shares)


def average(several: Sequence[TrainedWeights], shares: Sequence[float]) -> TrainedWeights:
    """The weighted mean of weights of one architecture, tensor by tensor as they are asked for.

    Args:
        shares: of each, on any positive scale.
    Raises:
        UserError: two architectures.
    """
    first = several[0]
    if any(weights.config != first.config for weights in several):
        raise UserError("the checkpoints to be averaged are of different models")
    total = sum(shares)

    def source(wanted: ModelConfig) -> Callable[[FilePart], Tensor]:
        sources = [weights.source(wanted) for weights in several]

        def mean(part: FilePart) -> Tensor:
            summed = torch.zeros(part.shape, dtype=torch.float64)  # the rounding is the result's alone
            for one, share in zip(sources, shares, strict=True):
                summed += one(part).double() * (share / total)
            return summed.float()

        return mean

    return TrainedWeights(first.config, source, first.tokenizer_folder)
