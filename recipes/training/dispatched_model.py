"""A trained model for evaluation: whole on one device, or spread over all of them by `accelerate`."""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.hf_layout import file_parts
from model.hf_weights import WeightsError
from model.losses import IGNORE_INDEX
from model.transformer import DeepseekForCausalLM
from recipes.cluster.launch import device_type
from recipes.config.errors import UserError
from recipes.training.grouped_products import choose_grouped_products
from recipes.training.trained_model import TrainedWeights, without_mtp

WHOLE_MODULES = ["DecoderLayer"]  # a layer is never cut in two
_FOR_WEIGHTS = 0.8  # of a GPU's free memory; the rest is for what an evaluation computes with


@torch.no_grad()
def dispatch_trained_model(
    weights: TrainedWeights, *, dtype: torch.dtype, max_memory: dict[int | str, int | str] | None = None
) -> DeepseekForCausalLM:
    """Spread the layers over the GPUs, and over the CPU's memory what they do not hold; in eval mode.

    Each tensor is read by itself and goes to its own device, so that no memory ever holds the whole.

    Args:
        max_memory: of each device, as accelerate takes it; None: the greater part of what is free.
    Raises:
        UserError: weights are missing, or the devices and the CPU together are too small.
    """
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
    from accelerate.utils import get_max_memory, set_module_tensor_to_device

    choose_grouped_products(device_type())
    config = without_mtp(weights.config)
    with init_empty_weights(include_buffers=True):
        model = DeepseekForCausalLM(config).to(dtype)
    if max_memory is None:
        free = get_max_memory()
        max_memory = {d: int(size * _FOR_WEIGHTS) if isinstance(d, int) else size for d, size in free.items()}
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=WHOLE_MODULES, dtype=dtype)
    if "disk" in device_map.values():
        raise UserError("--device_map auto: the model does not fit in the memory of the GPUs and the CPU together")
    shapes = model.state_dict()
    try:
        source = weights.source(config)
        for name, parts in groupby(file_parts(config), key=lambda part: part.name):
            tensor = torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
            for part in parts:
                part.of(tensor).copy_(source(part))
            set_module_tensor_to_device(model, name, _device_of(name, device_map), tensor, dtype=tensor.dtype)
    except WeightsError as error:
        raise UserError(*error.faults) from None
    for name, buffer in dict(model.named_buffers()).items():
        if buffer.is_meta:  # counts that no file holds
            set_module_tensor_to_device(model, name, _device_of(name, device_map), torch.zeros(buffer.shape))
    return dispatch_model(model, device_map).eval()


def _device_of(name: str, device_map: dict[str, Any]) -> Any:
    """The device of a tensor: that of the innermost module which the map names."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    device = device_map[name]
    return torch.device("cuda", device) if isinstance(device, int) else device


class LossFromLogits:
    """A dispatched model as `sum_losses` calls it.

    Its layers lie on several devices, and the model adds up its losses on one; the logits come back to the first.
    """

    def __init__(self, model: DeepseekForCausalLM) -> None:
        self.model = model

    def __call__(self, labels: Tensor, valid_tokens: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        logits = self.model(**batch)["logits"]
        labels = labels.to(logits.device)
        nats = [  # a sequence at a time, or float32 logits would take more than the model
            F.cross_entropy(row.float(), wanted, ignore_index=IGNORE_INDEX, reduction="sum")
            for row, wanted in zip(logits, labels, strict=True)
        ]
        return {"cross_entropy_sum": torch.stack(nats).sum(), "label_count": (labels != IGNORE_INDEX).sum()}
