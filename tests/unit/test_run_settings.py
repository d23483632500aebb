"""What a resume changes is shown, one line each, and nothing else is."""

from recipes.training.checkpoint_files import TrainingState
from recipes.training.resume import layout_changes
from recipes.training.run_settings import changed_settings


def test_only_what_differs_is_shown():
    saved = {"data": "code abc = 1", "peak learning rate": 1e-3, "gradient_clipping": 1.0, "batch_ramp": None}
    here = saved | {"peak learning rate": 5e-4, "batch_ramp": "8:1000"}
    assert changed_settings(saved, saved) == []
    assert changed_settings(saved, here) == ["peak learning rate: 0.001 -> 0.0005", "batch_ramp: none -> 8:1000"]


def test_a_setting_that_one_side_lacks_counts_as_none():
    assert changed_settings({"schedule.decay": 0.1}, {"schedule.hold": 3}) == [
        "schedule.hold: none -> 3",
        "schedule.decay: 0.1 -> none",
    ]
    assert changed_settings({}, {"seed": 1}) == []  # nothing was saved, so there is nothing to compare


def test_many_changes_end_in_a_count():
    lines = changed_settings({str(i): i for i in range(30)}, {str(i): i + 1 for i in range(30)})
    assert len(lines) == 13 and lines[-1] == "and 18 more"


def test_layout():
    state = TrainingState(world_size=2, zero_stage=1, dtype="bf16")
    here = {"world_size": 2, "zero_stage": 1, "dtype": "bf16", "autoep_size": 0}
    assert layout_changes(state, here) == []
    assert layout_changes(state, here | {"world_size": 4, "zero_stage": 3}) == [
        "world_size 2 -> 4",
        "zero_stage 1 -> 3",
    ]
