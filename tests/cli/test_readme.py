"""Every command of the README runs, shortened where it would take minutes, and every file it names is there."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from launching import REPOSITORY, free_port, metrics, run

README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line and not line.startswith("#")
]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_model, small_corpus):
    """A folder that stands for runs/: the run `tiny` in it was made by the README's own pretrain command."""
    folder = tmp_path_factory.mktemp("readme")
    result = run_command("deepspeed recipes/pretrain.py", folder, small_model, small_corpus, output="tiny")
    assert result.code == 0, result.output
    return folder


def run_command(command, folder, model, corpus, output=None):
    """Run a README line with a folder of the test's for runs/, and pretrain cut to two steps of a tiny shape."""
    words = [
        str(folder / word.removeprefix("runs/")) if word.startswith("runs/") else word for word in shlex.split(command)
    ]
    if "recipes/pretrain.py" in words:
        words += f"--model {model} --data {corpus} --max_steps 2 --seq_length 32 --global_batch_size 4".split()
        if output:
            words += ["--output_dir", str(folder / output)]
    if words[0] == "deepspeed":
        words[1:1] = ["--master_port", str(free_port())]
    if words[0] == "torchrun":
        words[1:1] = ["--master_port", str(free_port())]
    if words[0] == "tensorboard":
        words = ["tensorboard", "--inspect", *words[1:]]  # reads the same folder and ends, where the server would stay
    return run([str(BIN / words[0]), *words[1:]])


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.split()[0] in ("deepspeed", "torchrun", "tensorboard", "python")]
)
def test_command_runs(command, trained, small_model, small_corpus):
    if command == "deepspeed recipes/pretrain.py":
        assert len(metrics(trained / "tiny")) == 2  # the fixture ran it
        return
    result = run_command(command, trained, small_model, small_corpus)
    assert result.code == 0, result.output
    assert "Traceback" not in result.output


def test_other_commands_are_known():
    """What is neither run above nor listed here was never tried."""
    others = [c for c in COMMANDS if c.split()[0] not in ("deepspeed", "torchrun", "tensorboard", "python")]
    assert others == ["make pretrain", "make test", "source .venv/bin/activate"]
    for target in ("pretrain", "test", "check", "test-gpu"):
        planned = run(["make", "--dry-run", target])
        assert planned.code == 0, planned.output
    commands = run(["make", "--dry-run", "--no-print-directory", "pretrain"]).stdout.splitlines()
    assert commands[-1].endswith("deepspeed recipes/pretrain.py")


def test_named_files_exist():
    """A README that names files which are not there is worse than none."""
    named = set(
        re.findall(
            r"`((?:model|recipes|ds_configs|tests|benchmarks|docs)/[\w./-]*|[\w.-]+\.(?:txt|example|toml))`", README
        )
    )
    assert named
    missing = [name for name in sorted(named) if not (REPOSITORY / name).exists()]
    assert not missing
