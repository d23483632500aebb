"""docs/worked_example.md: the CPU's commands, as they stand there, from raw text to a chat answer and an export."""

import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

from chat_facts import conversations, write_jsonl
from launching import REPOSITORY, free_port, metrics, run

DOCUMENT = (REPOSITORY / "docs/worked_example.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", DOCUMENT, flags=re.DOTALL)[1].splitlines()
BIN = Path(sys.executable).parent


def lay_out(folder):
    """A checkout with a user's two files in it."""
    for name in ("model", "recipes", "ds_configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "text").mkdir()
    for path in (Path(json.__file__).parents[1] / "asyncio").glob("*.py"):
        shutil.copy(path, folder / "text" / f"{path.stem}.txt")
    train, _ = conversations()
    write_jsonl(folder / "chat.jsonl", train)


def run_all(folder):
    """{command: (how it ended, seconds)}."""
    found = {}
    for command in COMMANDS:
        words = shlex.split(command)
        port = ["--master_port", str(free_port())] if words[0] == "deepspeed" else []
        begin = time.perf_counter()
        found[command] = run([str(BIN / words[0]), *port, *words[1:]], cwd=folder), time.perf_counter() - begin
        assert found[command][0].code == 0, f"{command}\n{found[command][0].output[-3000:]}"
    return found


def test_the_gpus_commands_have_flags_that_exist(capsys):
    """They are not run; a flag that was renamed shows all the same."""
    import importlib

    from recipes.config.finetune_config import parse_finetune_config
    from recipes.config.run_config import parse_pretrain_config

    lines = re.findall(r"^    (.*recipes/\w+\.py .*)$", DOCUMENT, flags=re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        name, words = line.split("recipes/")[1].split(".py ")
        if name == "pretrain":
            parse_pretrain_config(shlex.split(words))
        elif name == "finetune":
            parse_finetune_config(shlex.split(words))
        elif name == "plan":
            importlib.import_module("recipes.plan").main([*shlex.split(words)])
            assert "recommended: 1gpu_bf16" in capsys.readouterr().out
        else:
            importlib.import_module(f"recipes.{name}").build_parser().parse_args(shlex.split(words))


def test_from_raw_text_to_a_chat_answer(tmp_path):
    lay_out(tmp_path)
    ended = {command.split()[1].split("/")[1]: result for command, (result, _) in run_all(tmp_path).items()}
    assert len(COMMANDS) == 7 and len(ended) == 6, "the document's commands have changed: look at this test, too"
    losses = [line["loss"] for line in metrics(tmp_path / "runs/example")]
    # by hand: at first every one of 4,096 ids is as likely, ln 4096 = 8.32
    assert 8.1 < losses[0] < 8.5 and losses[-1] < losses[0] - 1, losses
    assert "The fox is red." in ended["generate.py"].stdout
    assert (tmp_path / "exported/example_chat/config.json").exists()
    assert not list(tmp_path.glob("text/*.json")), "the user's files are left alone"
