"""Slurm's variables, as its documentation (srun, OUTPUT ENVIRONMENT VARIABLES) describes them."""

import pytest

from recipes.cluster.slurm import first_host, srun_environment, tasks_by_node

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "18003",
}


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4]), ("16(x10)", [16] * 10)]
)
def test_tasks_by_node(text, counts):
    assert tasks_by_node(text) == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("node1,node2", "node1"),
        ("node1", "node1"),
        ("rack[3,5]-gpu1", "rack3-gpu1"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_a_task_of_srun():
    assert srun_environment(TASK) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20003",
    }
    theirs = srun_environment(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (theirs["MASTER_ADDR"], theirs["MASTER_PORT"]) == ("10.0.0.1", "4000")


def test_what_is_no_task():
    batch_script = {name: TASK[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")}
    assert srun_environment(batch_script | {"SLURM_NTASKS": "16"}) == {}
    assert srun_environment(TASK | {"RANK": "0", "WORLD_SIZE": "2"}) == {}
    assert srun_environment({}) == {}
