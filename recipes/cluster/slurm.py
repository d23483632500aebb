"""A task that `srun` started directly, told in torch's variables."""

import re
from collections.abc import Mapping

PORTS = range(20000, 29000)  # of the job's master; below the ports that Linux gives to outgoing connections


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task of srun; empty for any other process.

    SLURM_STEP_NUM_TASKS is the sign of a task: a batch script itself also has SLURM_PROCID and the job's SLURM_NTASKS,
    and what runs there is one process. Where a launcher in the task has set RANK, the launcher's word counts.
    """
    if "RANK" in environ or "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return {}
    node = int(environ.get("SLURM_NODEID", "0"))
    job = int(environ.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks_by_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        # two jobs that share a node must not share its port
        "MASTER_PORT": environ.get("MASTER_PORT", str(PORTS[job % len(PORTS)])),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
    }


def tasks_by_node(text: str) -> list[int]:
    """Slurm's short form, `2(x3),1`, at length: [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        count, _, repeated = part.partition("(x")
        counts += [int(count)] * int(repeated.rstrip(")") or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[07-09,12],login1` begins with gpu07."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodelist)[0])
