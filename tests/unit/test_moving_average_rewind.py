"""A moving average goes back with the weights."""

from types import SimpleNamespace

import torch

from recipes.training import loop, moving_average
from recipes.training.checkpoint_files import TrainingState
from recipes.training.moving_average import MovingAverage


def test_a_rewind_takes_up_the_average_of_the_checkpoint(monkeypatch, tmp_path):
    for name, value in (("get_rank", 0), ("get_world_size", 1), ("barrier", None)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(moving_average, "list_checkpoints", lambda folder: [])
    weight = torch.nn.Parameter(torch.zeros(3))
    engine = SimpleNamespace(module=torch.nn.ParameterDict({"w": weight}))
    average = MovingAverage(engine, decay=0.5, every=1, run=tmp_path, step=0)
    for step in (1, 2, 3):
        with torch.no_grad():
            weight.fill_(8.0)
        average.update(step)
        if step == 2:
            average.save(2)
    assert average.tensors["w"].tolist() == [7.0] * 3  # by hand: 0, 4, 6, 7
    run = SimpleNamespace(moving_average=average, state=TrainingState(step=3), writer=SimpleNamespace(finish=None))
    run.plan = SimpleNamespace(layout={}, resolved=SimpleNamespace(batch_plan=SimpleNamespace(batch_at=lambda step: 1)))
    run._spike_watch = SimpleNamespace(answer=lambda *arguments: TrainingState(step=2))
    assert loop.TrainingRun._rewinds(run, None)
    assert run.state.step == 2 and average.tensors["w"].tolist() == [6.0] * 3
    run._spike_watch = SimpleNamespace(answer=lambda *arguments: None)
    assert not loop.TrainingRun._rewinds(run, None) and average.tensors["w"].tolist() == [6.0] * 3
