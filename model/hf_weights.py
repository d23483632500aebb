"""Weights to and from Hugging Face checkpoints, streamed: no more than one shard is in memory."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model.config import ModelConfig
from model.hf_layout import FilePart, empty_shared_experts, file_parts, is_redundant

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
_FP8_BLOCK = 128
MAX_SHARD_BYTES = 2 << 30


class WeightsError(ValueError):
    """Files that do not hold the model's weights.

    Args:
        faults: every fault found, one line each: the file or the tensor, and what is wrong with it.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


PartSource = Callable[[FilePart], Tensor]


def parts_of_state(state: Mapping[str, Tensor], config: ModelConfig) -> PartSource:
    """Our tensors by name as the source of the files' tensors.

    A mapping that reads lazily is asked for each tensor once in a row, so that one is in memory at a time. Names beyond
    the architecture (MTP layers where `config` has none) are passed over.

    Raises:
        WeightsError: `state` lacks tensors; the source itself raises it for one of another shape.
    """
    missing = sorted({part.name for part in file_parts(config)} - state.keys())
    if missing:
        raise WeightsError([f"{name}: missing in the weights to be written" for name in missing])
    name, tensor = "", torch.empty(0)

    def source(part: FilePart) -> Tensor:
        nonlocal name, tensor
        if part.name != name:
            tensor = torch.empty(0)  # let go of the last one before the next is made
            name, tensor = part.name, state[part.name].detach()
        view = part.of(tensor)
        if tuple(view.shape) != part.shape:
            raise WeightsError([f"{part.name}: shape {tuple(tensor.shape)} is not what the config describes"])
        return view

    return source


def parts_of_folder(folder: Path, config: ModelConfig) -> PartSource:
    """A Hugging Face folder as the source of another's tensors; FP8 weights come dequantized.

    Raises:
        WeightsError: as `read_hf_weights`.
    """
    files = _tensor_files(folder)
    opened = _OpenFiles(folder)
    _check(folder, files, list(file_parts(config)), config, opened)
    return lambda part: _read(part, files, opened)


def save_hf_weights(
    source: PartSource,
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write safetensors shards and their index into a folder that exists.

    The shards are planned from the architecture alone and filled one after the other, so one shard is in memory at a
    time, and what the source needs.

    Args:
        source: gives each tensor, see `parts_of_state` and `parts_of_folder`.
        dtype: of the files; router weights and balancing biases are float32 in any case.
        max_shard_bytes: a shard holds more only if one tensor does.
    """
    shards = _plan_shards(config, dtype, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for shard_name, parts in zip(names, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for part in parts:
            target = torch.float32 if part.keeps_float32 else dtype
            # Memory of its own: safetensors would write the whole tensor that a view belongs to.
            tensors[part.file_name] = source(part).to("cpu", target).clone(memory_format=torch.contiguous_format)
        if shard_name == names[-1]:
            tensors |= {name: torch.empty(shape, dtype=dtype) for name, shape in empty_shared_experts(config)}
        weight_map |= dict.fromkeys(tensors, shard_name)
        save_file(tensors, folder / shard_name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_bytes(part, dtype) for shard in shards for part in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_hf_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[FilePart, Tensor]]:
    """Stream the model's tensors out of a folder, one at a time, in the files' dtype; FP8 ones as float32.

    Reads transformers' layout and DeepSeek's own. FP8 weights (`weight_scale_inv` beside them) are multiplied by the
    scale of their 128 x 128 block.

    Args:
        folder: holds model.safetensors, or shards with model.safetensors.index.json.
        config: the model to fill; it may leave out MTP layers that the files have.
    Raises:
        WeightsError: before the first tensor: all that are missing, unexpected or have another shape; files that are
            missing or cannot be read.
    Source: DeepSeek-V3 (arXiv 2412.19437), sec. 3.3.2 (block scales).
    """
    files = _tensor_files(folder)
    parts = list(file_parts(config))
    opened = _OpenFiles(folder)
    _check(folder, files, parts, config, opened)
    for part in parts:
        yield part, _read(part, files, opened)


@torch.no_grad()
def load_hf_weights(model: nn.Module, folder: Path, config: ModelConfig) -> None:
    """Fill a model's parameters and balancing biases from a folder, keeping the model's dtype and device.

    Raises:
        WeightsError: as `read_hf_weights`; then nothing has been changed.
    """
    state = model.state_dict()
    for part, tensor in read_hf_weights(folder, config):
        part.of(state[part.name]).copy_(tensor)


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """(A, B) FP8 and (ceil(A / 128), ceil(B / 128)) scales of its blocks -> (A, B) float32."""
    each = scale.float().repeat_interleave(_FP8_BLOCK, 0)[: weight.shape[0]]
    return weight.float() * each.repeat_interleave(_FP8_BLOCK, 1)[:, : weight.shape[1]]


class _OpenFiles:
    """Safetensors files, mapped when first asked for. Two at most stay open: the pages of a mapped file count as
    memory, and layers lie in the files in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def of(self, file: str) -> Any:
        if file not in self._open:
            if len(self._open) == 2:
                self._open.pop(next(iter(self._open)))
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError([f"{self._folder / file}: cannot be read as safetensors ({error})"]) from None
        return self._open[file]


def _read(part: FilePart, files: dict[str, str], opened: _OpenFiles) -> Tensor:
    tensor = opened.of(files[part.file_name]).get_tensor(part.file_name)
    scale_name = part.file_name + SCALE_SUFFIX
    if scale_name not in files:
        return tensor
    return dequantize(tensor, opened.of(files[scale_name]).get_tensor(scale_name))


def _bytes(part: FilePart, dtype: torch.dtype) -> int:
    elements = 1
    for size in part.shape:
        elements *= size
    return elements * (4 if part.keeps_float32 else dtype.itemsize)


def _plan_shards(config: ModelConfig, dtype: torch.dtype, max_shard_bytes: int) -> list[list[FilePart]]:
    shards: list[list[FilePart]] = [[]]
    filled = 0
    for part in file_parts(config):
        size = _bytes(part, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += size
    return shards


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, by the index or from the single file's header."""
    if (folder / INDEX).is_file():
        try:
            files = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError([f"{folder / INDEX}: not an index of safetensors shards ({error!r})"]) from None
        gone = sorted(file for file in set(files.values()) if not (folder / file).is_file())
        if gone:
            raise WeightsError([f"{folder / file}: missing, though {INDEX} names it" for file in gone])
        return files
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_OpenFiles(folder).of(SINGLE).keys(), SINGLE)
    raise WeightsError([f"{folder}: holds neither {INDEX} nor {SINGLE}"])


def _check(folder: Path, files: dict[str, str], parts: list[FilePart], config: ModelConfig, opened: _OpenFiles) -> None:
    """Compare names, shapes and scales with what the config describes; headers are read, no values.

    Raises:
        WeightsError: every tensor that is missing, unexpected, or unlike the config.
    """
    expected = {part.file_name for part in parts}
    faults = [f"{folder}: {name} is missing" for name in sorted(expected - files.keys())]
    for name in sorted(files.keys() - expected):
        base = name.removesuffix(SCALE_SUFFIX)
        if base not in expected and not is_redundant(base, config):
            faults.append(f"{folder}: {name} is no part of the model that the config describes")
    for part in parts:
        if part.file_name not in files:
            continue
        tensor = opened.of(files[part.file_name]).get_slice(part.file_name)
        shape, scale_name = tuple(tensor.get_shape()), part.file_name + SCALE_SUFFIX
        if shape != part.shape:
            faults.append(f"{folder}: {part.file_name} has shape {shape}, the config makes it {part.shape}")
        elif scale_name in files:
            scales = tuple(opened.of(files[scale_name]).get_slice(scale_name).get_shape())
            blocks = tuple(-(-size // _FP8_BLOCK) for size in shape)
            if scales != blocks:
                faults.append(f"{folder}: {scale_name} has shape {scales}, the blocks of {shape} need {blocks}")
        elif tensor.get_dtype().startswith("F8"):
            faults.append(f"{folder}: {part.file_name} is {tensor.get_dtype()}, and {scale_name} is missing")
    if faults:
        raise WeightsError(faults)
