"""Say what is wrong with the hosts before a job finds out.

python recipes/doctor.py
python recipes/doctor.py --hostfile hostfile --deepspeed_config ds_configs/8gpu_zero2_bf16.json
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import EXIT_FAULT, EXIT_SUCCESS, UserError, run_command
from recipes.config.run_config import REPOSITORY


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description="Check the hosts of a hostfile (without one: this host) for what stops a training job, all at once "
        "over ssh, and measure the bandwidth between them. Exit code 0: all is well (warnings may be left); 1: a check "
        "failed; 2: the command or the hostfile is wrong.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--hostfile", help="DeepSpeed's hostfile; its first host is the master")
    add("--deepspeed_config", help="the ds_config of the run to come: its dtype must suit every host's GPUs")
    add("--data", nargs="*", type=Path, help="prepared folders, to be the same everywhere; default: those in runs/data")
    add("--output_dir", type=Path, default=REPOSITORY / "runs", help="where runs are written (default: runs)")
    add("--master_addr", help="as for deepspeed; default: what `hostname -I` says first on the first host")
    add("--master_port", type=int, default=29500, help="as for deepspeed (default: 29500)")
    add("--timeout", type=float, default=120, help="seconds that a host, and the probe, may take (default: 120)")
    add("--skip_probe", action="store_true", help="leave out the bandwidth probe")
    add("--write_env", action="store_true", help="first write .deepspeed_env from cluster.env, both in this folder")
    add("--remove_locks", action="store_true", help="delete the locks that killed op builds left, on every host")
    add("--json", action="store_true", help="print everything as one JSON line, and nothing else")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Check, report, and return the exit code."""
    arguments = build_parser().parse_args(argv)
    if not 0 < arguments.master_port < 65536:
        raise UserError(f"--master_port {arguments.master_port}: must be from 1 to 65535")
    if arguments.timeout <= 0:
        raise UserError(f"--timeout {arguments.timeout:g}: must be above 0 seconds")
    # before anything heavy is imported: a mistake in these files answers at once
    from recipes.cluster.env_file import write_deepspeed_env
    from recipes.cluster.hostfile import read_hostfile

    slots = read_hostfile(arguments.hostfile) if arguments.hostfile else None
    written = write_deepspeed_env(Path.cwd()) if arguments.write_env else []
    from recipes.cluster.diagnosis import Diagnosis, diagnose
    from recipes.cluster.launch import quiet_deepspeed, raise_open_files

    quiet_deepspeed()
    raise_open_files()
    if not arguments.json:
        print("\n".join([*written, f"checking {len(slots) if slots else 1} host(s) ..."]), flush=True)
    data = arguments.data
    if data is None:
        data = sorted(path.parent for path in (REPOSITORY / "runs" / "data").glob("*/manifest.json"))
    diagnosis: Diagnosis = diagnose(
        slots,
        dtype=_dtype(arguments.deepspeed_config),
        data=[folder.absolute() for folder in data],
        output_dir=arguments.output_dir.absolute(),
        master=arguments.master_addr,
        port=arguments.master_port,
        timeout=arguments.timeout,
        probe=not arguments.skip_probe,
        remove_locks=arguments.remove_locks,
    )
    result = diagnosis.result()
    print(json.dumps(result | {"written": written}) if arguments.json else "\n".join(diagnosis.lines()), flush=True)
    return EXIT_SUCCESS if result["ok"] else EXIT_FAULT


def _dtype(path: str | None) -> str | None:
    """What a ds_config trains in; None where there is none, or where it leaves that to the device."""
    if path is None:
        return None
    from recipes.config.ds_check import precision
    from recipes.config.ds_config import load_ds_config

    return precision(load_ds_config(path))


if __name__ == "__main__":
    sys.exit(run_command(main))
