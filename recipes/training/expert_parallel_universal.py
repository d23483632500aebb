"""Universal checkpoints between blocks of ours and of AutoEP: the same values under the other's names and shapes.

| ours | AutoEP's |
|---|---|
| `...mlp.gate.weight` | `...mlp.router.gate.weight` |
| `...mlp.experts.gate_up_proj` (E, 2I, H) | `...mlp.experts.w1`, `...mlp.experts.w3` (E, I, H) each |
| `...mlp.experts.down_proj` (E, H, I) | `...mlp.experts.w2` |

Adam's moments are translated as the weights are. Other numbers of ranks that share the experts are DeepSpeed's to load.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from recipes.training.expert_parallel_weights import own_name

_GATE, _ROUTER, _EXPERTS = ".mlp.gate.weight", ".mlp.router.gate.weight", ".mlp.experts."


def translate_universal(zero: Path, *, autoep: bool) -> None:
    """Rewrite the folders of the routers and routed experts for the blocks that will load them.

    Args:
        zero: the `zero` folder of a universal checkpoint, one folder a parameter. Nothing is done where the names are
            as wanted.
        autoep: whether AutoEP's blocks will load it.
    """
    for folder in sorted(path for path in zero.iterdir() if path.is_dir()):
        block, is_expert, part = folder.name.rpartition(_EXPERTS)
        w1, w2, w3, gate_up, down = (
            zero / f"{block}{_EXPERTS}{last}" for last in ("w1", "w2", "w3", "gate_up_proj", "down_proj")
        )
        if folder.name.endswith(_GATE if autoep else _ROUTER):
            folder.rename(zero / (folder.name.replace(_GATE, _ROUTER) if autoep else own_name(folder.name)))
        elif is_expert and autoep and part == "gate_up_proj":
            _rewrite([gate_up], w1, lambda both: both.chunk(2, dim=1)[0], autoep)
            _rewrite([gate_up], w3, lambda both: both.chunk(2, dim=1)[1], autoep)
            shutil.rmtree(gate_up)
        elif is_expert and autoep and part == "down_proj":
            _rewrite([down], w2, lambda whole: whole, autoep)
            shutil.rmtree(down)
        elif is_expert and not autoep and part == "w1":
            _rewrite([w1, w3], gate_up, lambda first, second: torch.cat([first, second], dim=1), autoep)
            shutil.rmtree(w1)
            shutil.rmtree(w3)
        elif is_expert and not autoep and part == "w2":
            _rewrite([w2], down, lambda whole: whole, autoep)
            shutil.rmtree(w2)


def _rewrite(sources: list[Path], target: Path, make: Callable[..., Tensor], autoep: bool) -> None:
    """Make each of a parameter's values (weight, moments) from those of others; the step is copied."""
    target.mkdir()
    for path in sources[0].glob("*.pt"):
        if path.stem == "step":
            shutil.copy(path, target)
            continue
        value = make(*(_value(source / path.name) for source in sources)).contiguous()
        # what makes DeepSpeed give each rank its own experts
        marks = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": value.shape[0]} if autoep else {}
        torch.save({"param": value} | marks, target / path.name)


def _value(path: Path) -> Tensor:
    """A state's tensor; DeepSpeed's converter leaves it bare at ZeRO stage 3."""
    content = torch.load(path, map_location="cpu", weights_only=False)
    return content["param"] if isinstance(content, dict) else content
