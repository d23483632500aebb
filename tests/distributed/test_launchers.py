"""Two ranks train the same, whoever starts them: DeepSpeed's launcher, torchrun, accelerate, Slurm's srun."""

import os
import sys
from pathlib import Path

import pytest
from launching import PRETRAIN, REPOSITORY, free_port, metrics, run, run_deepspeed

BIN = Path(sys.executable).parent
STUB = Path(__file__).parent / "slurm_stub"
JOB = {  # what Slurm sets in a batch script
    "SLURM_JOB_ID": "4711",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_NTASKS": "2",
    "PATH": os.pathsep.join([str(STUB), str(BIN), os.environ["PATH"]]),
}


@pytest.fixture(scope="module")
def flags(small_model, small_corpus):
    return (
        f"--deepspeed_config ds_configs/cpu.json --model {small_model} --data {small_corpus} --max_steps 4 "
        "--seq_length 32 --global_batch_size 4 --output_dir"
    ).split()


@pytest.fixture(scope="module")
def expected(tmp_path_factory, flags):
    """By DeepSpeed's launcher, with the middle one of three slots left out."""
    folder = tmp_path_factory.mktemp("deepspeed") / "run"
    launcher = [str(BIN / "deepspeed"), "--exclude", "localhost:1", "--master_port", str(free_port())]
    result = run([*launcher, PRETRAIN, *flags, str(folder)], LOCAL_SIZE="3")
    assert result.code == 0, result.output
    assert "devices        2 x" in result.stdout
    return losses(folder)


def losses(folder):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(folder)]


def sbatch(name, words, **extra):
    """Run a batch script as Slurm does: from the folder it was submitted in, with the job's variables."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run(["bash", f"recipes/slurm/{name}.sbatch", *words], cwd=REPOSITORY, **JOB, **where, **extra)


def start(launcher, words):
    port = str(free_port())
    if launcher == "torchrun":
        return run([str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", port, PRETRAIN, *words])
    if launcher == "accelerate":
        settings = ["--config_file", "recipes/accelerate/launch.yaml", "--num_processes", "2"]
        return run([str(BIN / "accelerate"), "launch", *settings, "--main_process_port", port, PRETRAIN, *words])
    if launcher == "srun":
        return sbatch("pretrain", words, SLURM_JOB_NODELIST="localhost", SLURM_NTASKS_PER_NODE="2")
    # both nodes are this host, whose loopback is refused as the master of several nodes unless presets are off
    words = [*words, "--nccl_preset", "none"]
    return sbatch("deepspeed", words, SLURM_JOB_NODELIST="node1,node2", SLURM_NTASKS_PER_NODE="1")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "srun", "srun_deepspeed"])
def test_every_launcher_trains_the_same(launcher, expected, flags, tmp_path):
    result = start(launcher, [*flags, str(tmp_path / "run")])
    assert result.code == 0, result.output
    assert result.stdout.count("finished 4 steps") == 1, result.output
    assert losses(tmp_path / "run") == expected
    assert (tmp_path / "run" / "finished.json").exists()
    assert not list(REPOSITORY.glob("hostfile_*")), "the batch script left its hostfile"


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_a_saved_job_goes_back_into_the_queue(code, requeued, tmp_path):
    notes = tmp_path / "notes"
    result = sbatch("pretrain", [], SLURM_JOB_NODELIST="node1", STUB_CODE=str(code), STUB_NOTES=str(notes))
    assert result.code == code, result.output
    assert notes.exists() == requeued
    if requeued:
        assert notes.read_text() == "requeue 4711\n"


def test_a_mistake_in_include_stops_the_launcher():
    """DeepSpeed's own check: the docs say what it prints."""
    result = run_deepspeed(["--include", "localhost:7", PRETRAIN])
    assert result.code == 1 and "No slot '7' specified on host 'localhost'" in result.output
