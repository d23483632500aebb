"""A run on two sources logs the loss of each, and how often each was gone through."""

import pytest
from launching import PRETRAIN, metrics, run_python


def test_loss_and_epochs_by_source(tmp_path, small_corpus, small_model):
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"line {number} of a text that has nothing of Python in it" for number in range(400)))
    words = f"--model {small_model} --max_steps 3 --seq_length 32 --global_batch_size 4 --output_dir {tmp_path / 'run'}"
    sources = ["--data", f"{small_corpus}=0.5", f"{tmp_path / 'prepared'}=0.5"]
    prepared = ["recipes/prepare_data.py", "--input", str(other), "--output", str(tmp_path / "prepared")]
    tokenizer = ["--tokenizer", str(small_corpus / "tokenizer"), "--holdout", "0"]
    assert run_python([*prepared, *tokenizer]).code == 0
    result = run_python([PRETRAIN, *words.split(), *sources])
    assert result.code == 0, result.output
    assert "0 loading processes a rank" in result.stdout
    for line in metrics(tmp_path / "run"):
        first, second = line["source_loss"].values()
        assert first != second
        # equal weights and a batch of 4: two sequences of 32 labels of each source in every step
        assert line["loss"] == pytest.approx((first + second) / 2, rel=1e-6)
        assert all(0 < epochs < 1 for epochs in line["source_epochs"].values())
        assert 0 <= line["data_wait_seconds"] < line["step_seconds"]
