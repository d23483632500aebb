"""Environment variables on their way to every node.

DeepSpeed's launcher stops at a blank line or a comment of `.deepspeed_env`. It puts a value with special characters
between double quotes without escaping any, and the node's shell then evaluates it; before that pdsh replaces %h, %n, %u
and %%. So people write `cluster.env`, in which a value is what stands after the first `=`, as it stands, and `render`
makes of it the file that brings exactly these values through DeepSpeed, pdsh, ssh and the shell.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from recipes.config.durable_file import write_durably
from recipes.config.errors import UserError

SOURCE = "cluster.env"
# DeepSpeed takes any line with a `=` for a variable. The shell sets `_` anew for each command, so that a comment, or a
# blank line, can be its value without reaching any program.
_REMARK = "_"
_MARKER = f"{_REMARK}=# written by recipes/doctor.py --write_env from {SOURCE}. edit that file, not this one"
_PLAIN = re.compile(r"[\w@%+=:,./-]*")  # what DeepSpeed leaves without quotes (MultiNodeRunner.add_export)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_COMMAND_BYTES = 100_000  # Linux allows 131,072 in one argument; the launch command itself takes some
# DeepSpeed's launcher gives every process its own values of these
_SET_BY_LAUNCHER = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES".split()
)
# what people set for a training job and expect on every node
_JOB_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "HF_", "OMP_")


def deepspeed_env_name() -> str:
    """The name of the file that DeepSpeed's launcher reads, in the home folder and in the current one."""
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def encode(value: str) -> str:
    """The text after `=` in `.deepspeed_env` for which a program on the node sees `value`, a text of one line."""
    body = value.replace("%", "%%")
    if _PLAIN.fullmatch(body):
        return body
    body = re.sub(r'(["$`\\])', r"\\\1", body)
    # DeepSpeed strips the value, then puts quotes around it: a closed pair at each end keeps its own spaces inside
    return body if body == body.strip() else f'""{body}""'


def arrives_as_written(value: str) -> bool:
    """Whether DeepSpeed carries a value exactly when it is written to `.deepspeed_env` as it stands."""
    return value == value.strip() and not re.search(r'["$`\\\n\r]|%[%hnu]', value)


def parse(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Parse `cluster.env`.

    Returns:
        (name, value) of each line, a remark (a comment or a blank line) under the name `_`; and the faults by line.
    """
    entries: list[tuple[str, str]] = []
    faults: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(text), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            entries.append((_REMARK, line.strip()))
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if fault := _fault_of(name, bool(equals), value):
            faults.append(f"line {number}: {fault}")
        elif name in seen:
            faults.append(f"line {number}: {name} is there already, in line {seen[name]}; leave one of them")
        else:
            entries.append((name, value))
        seen.setdefault(name, number)
    carried = sum(len(f"export {name}={encode(value)}; ".encode()) for name, value in dict(entries).items())
    if carried > _LONGEST_COMMAND_BYTES:
        longest = max(entries, key=lambda entry: len(entry[1]))[0]
        faults.append(
            f"the variables make a command of {carried:,} bytes, more than ssh takes ({longest} is the longest); "
            "shorten them, or put them into a file on the nodes"
        )
    return entries, faults


def _fault_of(name: str, has_value: bool, value: str) -> str | None:
    if not has_value:
        return f"{name!r} has no value; write NAME=value, or # before a comment"
    if name.startswith("export "):
        return f"{name!r}: leave out 'export', DeepSpeed adds it"
    if not _NAME.fullmatch(name) or name == _REMARK:
        return f"{name!r} is no name that a shell can export; use letters, digits and _"
    if name in _SET_BY_LAUNCHER:
        return (
            f"{name} is set by DeepSpeed's launcher on every node; use its flags and the hostfile, leave this line out"
        )
    if "\r" in value or "\0" in value:
        return f"{name} has a carriage return or a NUL in its value, which DeepSpeed cannot carry; leave it out"
    return None


def render(entries: Iterable[tuple[str, str]]) -> str:
    """The `.deepspeed_env` for entries of `parse`."""
    return "".join(f"{line}\n" for line in (_MARKER, *(f"{name}={encode(value)}" for name, value in entries)))


def write_deepspeed_env(folder: Path) -> list[str]:
    """Write `.deepspeed_env` from `cluster.env`, both in `folder`.

    Where there is no `cluster.env`, a `.deepspeed_env` written by hand becomes it, so that its comments stay.

    Returns:
        what was done, a line each.
    Raises:
        UserError: neither file is there, or lines of it cannot be carried.
    """
    source, target = folder / SOURCE, folder / deepspeed_env_name()
    by_hand = target.exists() and not _read(target).startswith(_MARKER)
    if source.exists():
        origin, done = source, []
        if by_hand and _read(target).strip():
            raise UserError(f"{target} and {source}: both were written by hand; put all variables into {source.name}")
    elif by_hand:
        origin, done = target, [f"{source}: holds what stood in {target}; edit it from now on"]
    else:
        raise UserError(f"{source}: is not there; write the variables into it, one NAME=value a line")
    text = _read(origin)
    entries, faults = parse(text)
    if faults:
        raise UserError(*(f"{origin}: {fault}" for fault in faults))
    if origin is target:
        write_durably(source, text)
    write_durably(target, render(entries))
    names = [name for name, _ in entries if name != _REMARK]
    return [*done, f"{target}: written from {source}: {', '.join(names) or 'no variable'}"]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # read_text would turn a carriage return into a line's end
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def check_deepspeed_env(folder: Path) -> list[str]:
    """What is wrong with a folder's `.deepspeed_env`, by line; nothing where there is none."""
    source, target = folder / SOURCE, folder / deepspeed_env_name()
    if not target.is_file():
        return [f"{source}: is not in use yet; run recipes/doctor.py --write_env"] if source.exists() else []
    text = _read(target)
    if text.startswith(_MARKER):
        if not source.exists():
            return [f"{target}: was written from {source}, which is gone; bring it back, or delete {target.name}"]
        entries, faults = parse(_read(source))
        if faults:
            return [f"{source}: {fault}" for fault in faults]
        return [] if text == render(entries) else [f"{target}: is not what {source} says; run doctor with --write_env"]
    found = []
    for number, line in enumerate(_lines(text), start=1):
        name, equals, value = line.partition("=")
        name = name.strip()
        if not line.strip() or not equals:
            found.append(f"line {number}: {line!r} has no '=', and DeepSpeed's launcher stops at it")
        elif name.startswith("#"):
            found.append(f"line {number}: {line!r} has an '=', so it cuts off the command that DeepSpeed sends")
        elif fault := _fault_of(name, True, value):
            found.append(f"line {number}: {fault}")
        elif not arrives_as_written(value):
            found.append(f"line {number}: {name} arrives on the nodes as something else than {value!r}")
    return [f"{target}: {text}; run recipes/doctor.py --write_env" for text in found]


def carried_names(folders: Iterable[Path]) -> set[str]:
    """The variables that the folders' `.deepspeed_env` set on the nodes; they win over those of the shell."""
    files = [folder / deepspeed_env_name() for folder in folders]
    lines = [line for file in files if file.is_file() for line in _lines(_read(file))]
    return {line.partition("=")[0].strip() for line in lines if "=" in line}


def check_exported(environment: Mapping[str, str], prefixes: Iterable[str]) -> list[str]:
    """Variables of this shell that do not reach the nodes, or not as they are.

    Args:
        prefixes: of the names that DeepSpeed's launcher forwards by itself.
    """
    prefixes = tuple(prefixes)
    remedy = f"put it into {SOURCE} and run recipes/doctor.py --write_env"
    found = []
    for name, value in sorted(environment.items()):
        if name.startswith(prefixes):
            if not arrives_as_written(value):
                found.append(f"{name}={value!r}: DeepSpeed forwards it, but not exactly; {remedy}")
        elif name.startswith(_JOB_PREFIXES):
            found.append(f"{name}={value!r}: is set in this shell, but DeepSpeed does not forward it; {remedy}")
    return found
