"""`recipes/doctor.py`: a broken hostfile, an ssh that answers in many ways, and this host with the probe."""

import json
import os

import pytest
from launching import free_port, run_python

from recipes.config.errors import run_command
from recipes.doctor import main
from recipes.pretrain import main as pretrain_main

TEN_FAULTS = (
    b"\xef\xbb\xbfnode0 slots=8\n"  # a byte-order mark
    b"# comments and blank lines are no faults\n\n"
    b"node1 slots=8\n"
    b"node1 slots=8\n"
    b"node2 slots=0\n"
    b"node3 slots=eight\n"
    b"node4\n"
    b"node5 slot=8\n"
    b"node6 slots=8 max_slots=8\n"
    b"node7:0,1 slots=2\n"
    b"node[8-9] slots=8\n"
    b"n\xf6de slots=8\n"
)


def test_ten_faults_of_a_hostfile_by_line(tmp_path, capsys):
    hosts = tmp_path / "hostfile"
    hosts.write_bytes(TEN_FAULTS)
    assert run_command(lambda: main(["--hostfile", str(hosts)])) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line.split(": ")[2] for line in lines] == [f"line {n}" for n in (1, 5, 6, 7, 8, 9, 10, 11, 12, 13)]
    assert all(line.startswith(f"error: --hostfile {hosts}: line ") for line in lines) and captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hostfile", "/nowhere"], "--hostfile /nowhere: cannot be read"),
        (["--master_port", "0"], "--master_port 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--deepspeed_config", "/nowhere.json"], "/nowhere.json"),
        (["--write_env"], "cluster.env: is not there"),
    ],
)
def test_wrong_input(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert run_command(lambda: main(words)) == 2
    assert message in capsys.readouterr().err


SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && shift; shift; done
host=$1; shift
case "$host $1" in
  refused*) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255;;
  nokey*) echo "root@nokey: Permission denied (publickey)." >&2; exit 255;;
  unknown*) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255;;
  "late date"*) echo 1000.5; echo 10.0.0.9; exit 0;;
  late*|"elsewhere cd"*) echo "bash: cd: /work: No such file or directory" >&2; exit 1;;
esac
exec bash -c "$*"
"""


def test_each_way_in_which_a_host_does_not_answer(tmp_path, monkeypatch, capsys):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("# c\n\nA=64(x2)\n")
    names = ("here", "refused", "nokey", "unknown", "late", "elsewhere")
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
    words = ["--hostfile", "hostfile", "--master_port", str(free_port()), "--json"]
    assert main(words) == 1
    result = json.loads(capsys.readouterr().out)
    failed = {(f["host"], f["check"]): f["remedy"] for f in result["findings"] if f["state"] == "failed"}
    assert "sshd" in failed["refused", "ssh"] and "ssh-copy-id nokey" in failed["nokey", "ssh"]
    assert "hostfile, or DNS" in failed["unknown", "ssh"] and "NTP" in failed["late", "clock"]
    assert "same path" in failed["elsewhere", "facts"]
    assert list(result["facts"]) == ["here"] and not any(host == "here" for host, _ in failed)
    texts = [f["text"] for f in result["findings"] if f["check"] == "variables"]
    assert sum(".deepspeed_env: line" in text for text in texts) == 2
    assert any(text.startswith("NCCL_DEBUG='INFO'") for text in texts)


def test_this_host_with_the_probe_and_a_stale_lock(tmp_path):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    words = ["recipes/doctor.py", "--master_port", str(free_port()), "--deepspeed_config", "ds_configs/cpu.json"]
    result = run_python([*words, "--remove_locks"], TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert result.code == 0, result.output
    assert f"removed {lock}" in result.stdout and not lock.exists()
    assert "all is well" in result.stdout.splitlines()[-1]
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        speed = next(line.split()[1] for line in result.stdout.splitlines() if line.split()[:1] == [collective])
        assert float(speed) > 0


def test_a_dry_run_shows_the_preset_and_does_the_quick_checks(small_model, small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    words = f"--model {small_model} --data {small_corpus} --max_steps 2 --output_dir {tmp_path / 'run'} --dry_run"
    words = [*words.split(), "--json", "--set", "zero_optimization.stage=1"]
    assert pretrain_main(words) == 0
    out = capsys.readouterr().out
    preset = json.loads(out.splitlines()[-1])["nccl_preset"]
    assert "nccl preset    auto" in out and preset["name"] == "auto" and preset["set"] == {}
    assert "allreduce:tree" in preset["warnings"][0] and "warning        NCCL_ALGO=Tree" in out
    monkeypatch.setattr("recipes.cluster.preflight.CHECKPOINT_BYTES", 1 << 60)
    assert run_command(lambda: pretrain_main(words)) == 2
    assert "disk" in capsys.readouterr().err
    assert pretrain_main([*words, "--skip_preflight"]) == 0
