"""DeepSpeed's hostfile, read strictly: every line that DeepSpeed would misread or refuse is named, all at once."""

import codecs
import re
from pathlib import Path

from recipes.config.errors import UserError

# pdsh expands commas and brackets into more hosts than DeepSpeed counts; a leading dash would be an option of ssh.
_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s*#.*|\s*)", re.ASCII)


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Read a hostfile: one `HOST slots=N` a line, with blank lines and `#` comments.

    Returns:
        host -> slots, in the file's order; the first host is the master.
    Raises:
        UserError: with every line that is wrong, by its number.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--hostfile {path}: cannot be read ({error.strerror}); give a hostfile") from None
    hosts, faults = parse_hostfile(content)
    if faults:
        raise UserError(*(f"--hostfile {path}: {fault}" for fault in faults))
    return hosts


def parse_hostfile(content: bytes) -> tuple[dict[str, int], list[str]]:
    """Parse a hostfile's bytes.

    Returns:
        host -> slots of the good lines, and one text for each fault. Lines that end in CRLF are read as DeepSpeed
        does, which drops the CR.
    """
    faults: list[str] = []
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return {}, ["line 1: the file is UTF-16; save it as UTF-8 without a byte-order mark"]
    if content.startswith(codecs.BOM_UTF8):
        faults.append("line 1: begins with a byte-order mark, which becomes part of the host's name; save without it")
        content = content.removeprefix(codecs.BOM_UTF8)
    hosts: dict[str, int] = {}
    lines_of: dict[str, int] = {}
    for number, raw in enumerate(content.splitlines(), start=1):
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            faults.append(f"line {number}: is not UTF-8; save the file as UTF-8")
            continue
        if not line or line.startswith("#"):
            continue
        host, slots, fault = _parse_line(line)
        # ssh and DNS take names in either case as one host, DeepSpeed as two
        if host and host.lower() in lines_of:
            fault = (
                f"{host} is there already, in line {lines_of[host.lower()]}; write one line with the sum of the slots"
            )
        elif host:
            lines_of[host.lower()] = number
        if fault:
            faults.append(f"line {number}: {fault}")
        elif host:
            hosts[host] = slots
    if not hosts and not faults:
        faults.append("no host in it; write one a line: node1 slots=8")
    return hosts, faults


def _parse_line(line: str) -> tuple[str | None, int, str | None]:
    """Host, slots and fault of a line; where the host can be told it is given with a fault, too."""
    name = line.split()[0]
    if not _HOST.fullmatch(name):
        if ":" in name or "@" in name:
            hint = "choose hosts and slots by deepspeed's --include or --exclude, not in the hostfile"
        elif re.search(r"[\[\],]", name):
            hint = "write each host in a line of its own"
        else:
            hint = "a host is a name or an address of letters, digits, dots and dashes"
        return None, 0, f"{name!r} is no host; {hint}"
    if (match := _LINE.fullmatch(line)) is None:
        return name, 0, f"{line!r}: {_what_is_wrong(line)}"
    slots = int(match[2])
    if slots == 0:
        return name, 0, f"{name} has slots=0; write the number of its GPUs, or leave the line out"
    return name, slots, None


def _what_is_wrong(line: str) -> str:
    name, rest = line.split()[0], line.split("#")[0].split()[1:]
    good = f"write {name} slots=8"
    if not rest:
        return f"no slots; {good}"
    if not rest[0].startswith("slots="):
        return f"{' '.join(rest)!r} stands where slots=N must; {good}"
    if not re.fullmatch(r"\d+", value := rest[0].removeprefix("slots="), re.ASCII):
        return f"slots={value} is no whole number; {good}"
    return f"{' '.join(rest[1:])!r} after the slots is ignored by DeepSpeed; leave it out"
