"""Everything that the doctor asks of the hosts, and what came of it."""

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from recipes.cluster.env_file import carried_names, check_deepspeed_env, check_exported, deepspeed_env_name
from recipes.cluster.host_checks import check_hosts, clock_finding
from recipes.cluster.preflight import FAILED, OK, WARNING, Finding
from recipes.cluster.probe import run_probe
from recipes.cluster.remote import Ended, module_command, on_all, run_on

_SLOW_GBYTES_PER_SECOND = 0.1  # less than a link of 1 Gbit/s carries
_SIGNS = {OK: "ok", WARNING: "WARN", FAILED: "FAIL"}


@dataclass
class Diagnosis:
    """What the doctor found. facts: of each host that answered; probe: rank 0's measurements."""

    hosts: list[str]
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] | None = None

    def result(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": all(finding.state != FAILED for finding in self.findings),
            "hosts": self.hosts,
            "findings": [vars(finding) for finding in self.findings],
            "probe": self.probe,
            "facts": self.facts,
        }

    def lines(self) -> list[str]:
        """For the terminal: the table, the bandwidths, and a line with what to do for each check that is not well."""
        lines = self._table()
        if self.probe:
            lines += ["", f"bandwidth of {self.probe['ranks']} ranks, {self.probe['backend']}, "
                          f"{self.probe['bytes'] / 1e6:.0f} MB, on each link of a ring:"]  # fmt: skip
            for name, measured in self.probe["collectives"].items():
                lines.append(f"  {name:<15}{measured['bus_gbytes_per_second']:8.2f} GB/s")
        bad = [finding for state in (WARNING, FAILED) for finding in self.findings if finding.state == state]
        lines += ["", *(f"{_SIGNS[finding.state]:<4} {finding.line()}" for finding in bad)]
        failed = sum(finding.state == FAILED for finding in bad)
        warned = len(bad) - failed
        verdict = f"{failed} check(s) failed" if failed else "all is well"
        return [*lines, verdict + (f", {warned} warning(s)" if warned else "")]

    def _table(self) -> list[str]:
        rows = [(f.host, f.check, _SIGNS[f.state], f.text) for f in self.findings]
        widths = [max(len(row[column]) for row in [("host", "check", "", ""), *rows]) for column in range(3)]
        order = {host: number for number, host in enumerate(self.hosts)}
        rows.sort(key=lambda row: order.get(row[0], -1))
        return [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
            for row in [("host", "check", "", "what was seen"), *rows]
        ]


def diagnose(
    slots: Mapping[str, int] | None,
    *,
    dtype: str | None,
    data: Sequence[Path],
    output_dir: Path,
    master: str | None,
    port: int,
    timeout: float,
    probe: bool,
    remove_locks: bool,
) -> Diagnosis:
    """Ask all hosts of a hostfile, or this one alone where there is none."""
    here = platform.node()
    addresses: dict[str, str | None] = {name: name for name in slots} if slots else {here: None}
    found = Diagnosis(list(addresses))
    if slots:
        first_addresses = _reach(found, min(timeout, 30.0))
        master = master or first_addresses
        found.findings += _launcher(here, several=len(slots) > 1)
    else:
        master = master or "127.0.0.1"
    silent = {finding.host for finding in found.findings if finding.check == "ssh" and finding.state == FAILED}
    answering = [host for host in addresses if host not in silent]
    asked = ["--json", "--output_dir", str(output_dir), *(["--master", master] if master else [])]
    asked += ["--remove_locks"] if remove_locks else []
    asked += ["--data", *map(str, data)] if data else []
    work = []
    for host in answering:
        own = [*asked, "--port", str(port)] if host == found.hosts[0] else asked
        work.append(partial(run_on, addresses[host], module_command("recipes.cluster.host_facts", own), timeout))
    for host, ended in zip(answering, on_all(work), strict=True):
        _take_facts(found, host, ended)
    if found.facts:
        found.findings += check_hosts(found.facts, slots, dtype=dtype, port=port)
        found.findings += [
            Finding(host, "op locks", OK, f"removed {lock}")
            for host, own in found.facts.items()
            for lock in own["removed_locks"]
        ]
    if probe:
        _probe(found, addresses, slots, master, port, timeout)
    return found


def _reach(found: Diagnosis, timeout: float) -> str | None:
    """Log in to every host, and compare its clock; return the first address of the first host."""
    command = "date +%s.%N && hostname -I"
    answers = on_all([partial(run_on, host, command, timeout) for host in found.hosts])
    for host, ended in zip(found.hosts, answers, strict=True):
        lines = ended.stdout.splitlines()
        try:
            clock = float(lines[-2])
        except (ValueError, IndexError):
            text, remedy = ended.cause()
            found.findings.append(Finding(host, "ssh", FAILED, text, remedy))
            continue
        found.findings.append(Finding(host, "ssh", OK, f"answers in {ended.end - ended.begin:.1f} s"))
        uncertainty = (ended.end - ended.begin) / 2
        found.findings.append(clock_finding(host, clock - ended.begin - uncertainty, uncertainty))
    last = answers[0].stdout.splitlines()[-1:]  # a login shell may greet before
    addresses = " ".join(last).split()
    return addresses[0] if answers[0].code == 0 and addresses else None


def _take_facts(found: Diagnosis, host: str, ended: Ended) -> None:
    try:
        # a login shell may greet before
        found.facts[host] = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        text, remedy = ended.cause()
        found.findings.append(Finding(host, "facts", FAILED, text, remedy))


def _launcher(here: str, *, several: bool) -> list[Finding]:
    """This host as the one that starts the job: pdsh, and the variables that go with it."""
    # DeepSpeed says which prefixes it forwards; importing its runner takes seconds, which only a hostfile is worth
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher.runner import EXPORT_ENVS

    findings = []
    if several:
        remedy = "install it (apt-get install pdsh), or use another --launcher of deepspeed"
        there = shutil.which("pdsh")
        findings.append(
            Finding(here, "pdsh", OK, there) if there else Finding(here, "pdsh", FAILED, "is missing", remedy)
        )
        forwarded = [*EXPORT_ENVS, *get_accelerator().export_envs()]
        # one file, where DS_ENV_FILE is an absolute path
        folders = list({folder / deepspeed_env_name(): folder for folder in (Path.home(), Path.cwd())}.values())
        left = {name: value for name, value in os.environ.items() if name not in carried_names(folders)}
        findings += [Finding(here, "variables", WARNING, text) for text in check_exported(left, forwarded)]
        for folder in folders:
            findings += [Finding(here, "variables", FAILED, text) for text in check_deepspeed_env(folder)]
    return findings


def _probe(
    found: Diagnosis,
    addresses: Mapping[str, str | None],
    slots: Mapping[str, int] | None,
    master: str | None,
    port: int,
    timeout: float,
) -> None:
    """Measure the bandwidth, where every host can take part."""
    first = found.hosts[0]
    missing = [host for host in found.hosts if host not in found.facts]
    if missing or master is None or not found.facts[first]["port_free"]:
        why = f"{', '.join(missing)} did not answer" if missing else f"port {port} is in use, or no address is known"
        found.findings.append(Finding(first, "bandwidth", WARNING, f"not measured: {why}", "see the lines above"))
        return
    ranks = []
    for host, address in addresses.items():
        gpus = found.facts[host]["torch_gpus"]
        on_cpu = 2 if len(addresses) == 1 else 1
        ranks.append((address, min(gpus, slots[host]) if gpus and slots else gpus or on_cpu))
    if sum(count for _, count in ranks) < 2:
        found.findings.append(Finding(first, "bandwidth", OK, "one GPU: nothing to measure"))
        return
    found.probe, failed = run_probe(ranks, master=master, port=port, timeout=timeout)
    if failed:
        text, remedy = failed[0].cause()
        remedy = f"see that firewalls let hosts reach {master}:{port} and each other's ports; {remedy}"
        found.findings.append(Finding(failed[0].host or first, "bandwidth", FAILED, text, remedy))
        return
    assert found.probe is not None
    slowest = min(one["bus_gbytes_per_second"] for one in found.probe["collectives"].values())
    slow = len(addresses) > 1 and slowest < _SLOW_GBYTES_PER_SECOND
    remedy = "see which interface is used (--nccl_preset debug), and its link speed" if slow else ""
    text = f"at least {slowest:.2f} GB/s in each collective"
    found.findings.append(Finding(first, "bandwidth", WARNING if slow else OK, text, remedy))
