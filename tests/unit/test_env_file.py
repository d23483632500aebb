"""Variables reach the nodes exactly: through DeepSpeed's own parsing and command line, pdsh, and a shell."""

import argparse
import json
import os
import shutil
import subprocess
import sys

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner

from recipes.cluster.env_file import arrives_as_written, check_deepspeed_env, check_exported, write_deepspeed_env
from recipes.config.errors import UserError

VALUES = {
    "PLAIN": "a,b:c/d.e-f@g+h=i",
    "PARENTHESES": "64(x2)",
    "SPACES": "two  words",
    "OUTER_SPACES": "  around ",
    "DOUBLE": 'say "hi"',
    "SINGLE": "it's",
    "DOLLAR": "$HOME ${HOME} $(echo x) `echo y`",
    "BACKSLASH": r"a\b \" \\ end\\"[:-1],
    "PERCENT": "%n %h %u %% 100%",
    "PERCENT_PLAIN": "%n%%",
    "SHELL": "a;b&c|d>e<f*g?h[i]{j,k}~!#l",
    "UNICODE": "Zürich größer",
    "QUOTED": '"a b"',
    "TAB": "a\tb",
    "EMPTY": "",
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
}


def remote_words(folder):
    """What DeepSpeed sends to a host for a folder's .deepspeed_env, built as its main() does."""
    arguments = argparse.Namespace(
        user_script="train.py", user_args=[], ssh_port=None, launcher_args="", master_addr="10.0.0.1",
        master_port=29500, venv_script=None, no_python=False, module=False, no_local_rank=False, save_pid=False,
        enable_each_rank_log=None,
    )  # fmt: skip
    runner = PDSHRunner(arguments, "e30=")
    with open(folder / ".deepspeed_env") as file:
        for line in file.readlines():
            runner.add_export(*line.split("=", maxsplit=1))
    command, _, _ = runner.get_cmd({}, {"node1": [0]})
    assert command[:5] == ["pdsh", "-S", "-f", "1024", "-w"]
    exports, change_folder = command[6:8]
    # in place of the launch module, a program that shows its environment
    return [exports, change_folder, sys.executable, "-c", "'import json, os; print(json.dumps(dict(os.environ)))'"]


def seen_on_node(folder):
    """What a program sees: pdsh's replacements by hand, then a shell, as sshd starts it."""
    text = " ".join(remote_words(folder))
    for sign, replacement in (("%%", "\0"), ("%n", "0"), ("%h", "node1"), ("%u", "root"), ("\0", "%")):
        text = text.replace(sign, replacement)
    clean = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    return json.loads(subprocess.run(["bash", "-c", text], env=clean, capture_output=True, check=True).stdout)


@pytest.fixture
def source(tmp_path):
    lines = ["# the fabric's variables", "", *(f"{name}={value}" for name, value in VALUES.items()), '# it\'s "$1" = x']
    (tmp_path / "cluster.env").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_every_value_arrives_exactly(source):
    write_deepspeed_env(source)
    seen = seen_on_node(source)
    assert {name: seen.get(name) for name in VALUES} == VALUES
    assert check_deepspeed_env(source) == []


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_every_value_arrives_exactly_through_pdsh(source):
    """The real pdsh, with an ssh that runs its command in a shell on this host."""
    ssh = source / "bin" / "ssh"
    ssh.parent.mkdir()
    # pdsh calls ssh OPTIONS... [-lUSER] HOST COMMAND...
    ssh.write_text('#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nshift\nexec bash -c "$*"\n')
    ssh.chmod(0o755)
    write_deepspeed_env(source)
    environment = {"PATH": f"{ssh.parent}:{os.environ['PATH']}", "PDSH_RCMD_TYPE": "ssh", "LC_ALL": "C.UTF-8"}
    command = ["pdsh", "-N", "-S", "-f", "1024", "-w", "node1", *remote_words(source)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    seen = json.loads(finished.stdout)
    assert {name: seen.get(name) for name in VALUES} == VALUES


def test_comments_and_blank_lines_survive_and_a_second_write_changes_nothing(tmp_path):
    by_hand = '# about A\n\nA=64(x2)\nB=say "hi"\n'
    (tmp_path / ".deepspeed_env").write_text(by_hand)
    faults = check_deepspeed_env(tmp_path)
    assert [fault.split(": ")[1] for fault in faults] == ["line 1", "line 2", "line 4"], faults
    write_deepspeed_env(tmp_path)
    assert (tmp_path / "cluster.env").read_text() == by_hand
    written = (tmp_path / ".deepspeed_env").read_text()
    assert "# about A" in written and "\n_=\n" in written
    write_deepspeed_env(tmp_path)
    assert (tmp_path / ".deepspeed_env").read_text() == written
    seen = seen_on_node(tmp_path)
    assert (seen["A"], seen["B"]) == ("64(x2)", 'say "hi"')


def test_an_edited_source_is_noticed(source):
    write_deepspeed_env(source)
    with (source / "cluster.env").open("a") as file:
        file.write("LATER=1\n")
    assert "is not what" in check_deepspeed_env(source)[0]
    (source / "cluster.env").unlink()
    assert "is gone" in check_deepspeed_env(source)[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A-B=1", "no name that a shell can export"),
        ("just words", "no value"),
        ("export A=1", "leave out 'export'"),
        ("MASTER_ADDR=10.0.0.1", "set by DeepSpeed's launcher"),
        ("A=1\rB=2", "carriage return"),
        ("A=1\nA=2", "is there already, in line 2"),
        ("LONG=" + "x" * 200_000, "LONG is the longest"),
    ],
)
def test_what_cannot_be_carried_is_named(tmp_path, line, words):
    with open(tmp_path / "cluster.env", "w", newline="") as file:
        file.write(f"# first\n{line}\n")
    with pytest.raises(UserError, match=words):
        write_deepspeed_env(tmp_path)
    assert not (tmp_path / ".deepspeed_env").exists()


def test_two_files_by_hand_are_not_merged(source):
    (source / ".deepspeed_env").write_text("X=1\n")
    with pytest.raises(UserError, match="both were written by hand"):
        write_deepspeed_env(source)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_check_knows_what_a_raw_value_becomes(tmp_path, value):
    """What the check calls exact really is, and what it refuses is really changed, without our encoding."""
    (tmp_path / ".deepspeed_env").write_text(f"V={value}\n")
    try:
        arrived = seen_on_node(tmp_path).get("V") == value
    except subprocess.CalledProcessError:
        arrived = False
    assert arrives_as_written(value) == arrived
    assert bool(check_deepspeed_env(tmp_path)) == (not arrived)


def test_variables_of_the_launching_shell():
    environment = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a b",
        "PYTHON_X": 'a"b',
        "GLOO_SOCKET_IFNAME": "eth0",
        "HOME": "/",
    }
    on_gpus = check_exported(environment, ["PYTHON", "NCCL"])
    assert [text.split("=")[0] for text in on_gpus] == ["GLOO_SOCKET_IFNAME", "PYTHON_X"]
    on_cpu = check_exported(environment, ["PYTHON"])
    assert [text.split("=")[0] for text in on_cpu] == ["GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "PYTHON_X"]
