"""Fine-tuning resumes to the bit, and two ranks train and evaluate as one."""

import json

import pytest
from chat_facts import conversations, write_jsonl, write_untrained
from launching import metrics, run_ranks

SCRIPT = "tests/distributed/train_finetunes.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs: on one rank `whole` (6 steps) and `halves` (3, then resumed to 6), on two `pair`."""
    folder = tmp_path_factory.mktemp("finetunes")
    train, heldout = conversations()
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "text.jsonl", [{"text": m["content"]} for r in heldout for m in r["messages"]])
    write_untrained(folder / "base", train + heldout, num_nextn_predict_layers=1)
    shared = f"--init_from {folder / 'base'} --data {folder / 'train.jsonl'} --global_batch_size 4 --seq_length 64"
    shared += " --deepspeed_config ds_configs/cpu.json --learning_rate 1e-3 --bias_update_speed 0.01 --set"
    words = [*shared.split(), 'scheduler={"type":"constant"}']

    def finetune(name, steps):
        return [*words, "--output_dir", str(folder / name), "--max_steps", str(steps)]

    def launch(ranks, finetunes):
        files = {"answers": ["train.jsonl", "--conversations", "--batch_size", "2"]}
        files["text"] = ["text.jsonl", "--batch_size", "3", "--seq_length", "32"]
        evaluations = [
            [
                str(folder / "whole"),
                "--output",
                str(folder / f"{name}{ranks}.json"),
                "--data",
                str(folder / file),
                *flags,
            ]
            for name, (file, *flags) in files.items()
        ]
        jobs = folder / f"jobs{ranks}.json"
        jobs.write_text(json.dumps({"finetune": finetunes, "evaluate": evaluations}))
        run_ranks([SCRIPT, str(jobs)], ranks=ranks)

    launch(1, [finetune("whole", 6), finetune("halves", 3), finetune("halves", 6)])
    launch(2, [finetune("pair", 6)])
    return folder


def losses(folder):
    keys = ("loss", "mtp_loss", "balance_loss", "grad_norm")
    return [{key: line[key] for key in keys} for line in metrics(folder)]


def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(runs):
    assert len(losses(runs / "whole")) == 6
    assert losses(runs / "halves") == losses(runs / "whole")
    last = [metrics(runs / name, evaluation=True)[-1] for name in ("whole", "halves")]
    assert last[0] == last[1]
    assert all(line["mtp_loss"] > 0 for line in losses(runs / "whole")), "the MTP layer is trained as the config says"


def test_two_ranks_train_as_one(runs):
    for one, two in zip(losses(runs / "whole"), losses(runs / "pair"), strict=True):
        # sums over tokens in another order, in float32, over six steps
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["mtp_loss"] == pytest.approx(one["mtp_loss"], rel=1e-4)


@pytest.mark.parametrize("source", ["answers", "text"])
def test_an_evaluation_is_the_same_on_two_ranks(runs, source):
    one, two = (json.loads((runs / f"{source}{ranks}.json").read_text())["data"][0] for ranks in (1, 2))
    assert one["tokens"] > 100
    assert two["tokens"] == one["tokens"]
    # the same batches; only the last sums, in float64, are in another order
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-12)
