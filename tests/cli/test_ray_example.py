"""The example of docs/tuning.md for Ray Tune's users runs, on a smaller model."""

import re
from importlib.util import find_spec

import pytest
from launching import REPOSITORY, run_python

EXAMPLE = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs/tuning.md").read_text(), flags=re.DOTALL)[1]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which is optional: pip install 'ray[tune]'")
def test_the_example_for_ray_tune(small_model, small_corpus, tmp_path):
    shape = ["--model", str(small_model), "--data", str(small_corpus), "--seq_length", "32", "--global_batch_size", "4"]
    shorter = EXAMPLE.replace('"--model", "tiny", "--max_steps", "100"', f'*{shape}, "--max_steps", "3"')
    shorter = shorter.replace("num_samples=12", "num_samples=2")
    assert shorter.count(str(small_model)) == 1 and "num_samples=2" in shorter, "the example has changed"
    script = tmp_path / "example.py"
    script.write_text(shorter)
    result = run_python([str(script)], PYTHONPATH=str(REPOSITORY), HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0")
    assert result.code == 0, result.output[-4000:]
    rate = float(re.search(r"\{'lr': ([\d.e-]+)\}", result.stdout)[1])
    assert 1e-3 <= rate <= 1e-1
