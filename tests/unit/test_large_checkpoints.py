"""What a large checkpoint asks of a host: converted by as many processes as memory holds, its weights mapped."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from model.config import load_model_config
from recipes.training.checkpoint import load_checkpoint
from recipes.training.universal import converter_workers

GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "workers"),
    [
        (1000 * GIB, (64, 64)),
        (100 * GIB, (12, 64)),  # 2 x 4 GiB for each that takes a file apart
        (1 * GIB, (1, 64)),
        (17 << 20, (1, 2)),  # 2 x 4 MiB for each that puts a parameter together
        (0, (1, 1)),
    ],
)
def test_no_more_processes_convert_than_memory_holds(tmp_path, available, workers):
    for name, size in (("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 4 * GIB), ("rng_00000.pt", 100)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    config = load_model_config("tiny").to_dict()  # its table: 4,096 x 256 x 4 bytes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert converter_workers(tmp_path, available, cores=64) == workers


@pytest.mark.parametrize(("stage", "mapped"), [(0, False), (1, True), (2, True), (3, False)])
def test_ranks_share_the_pages_of_rank_0s_weights(tmp_path, monkeypatch, stage, mapped):
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"weight": torch.ones(4)}, tmp_path / name)
    read = {}
    monkeypatch.setattr(torch, "load", lambda path, mmap=False, load=torch.load, **words: read.update({path: mmap}))
    usual = SimpleNamespace(load=lambda path, map_location: read.update({path: False}))

    class Engine:
        optimizer = SimpleNamespace(param_groups=[])
        lr_scheduler = SimpleNamespace(base_lrs=[])
        checkpoint_engine = usual

        def zero_optimization_stage(self):
            return stage

        def load_checkpoint(self, folder, tag):
            for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                self.checkpoint_engine.load(name, map_location=None)
            raise KeyboardInterrupt

    engine = Engine()
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(engine, tmp_path)
    assert read == {"mp_rank_00_model_states.pt": mapped, "zero_pp_rank_0_mp_rank_00_optim_states.pt": False}
    assert engine.checkpoint_engine is usual
