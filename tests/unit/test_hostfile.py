"""A hostfile is read as DeepSpeed reads it, or refused by line."""

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from recipes.cluster.hostfile import parse_hostfile, read_hostfile
from recipes.config.errors import UserError


@pytest.mark.parametrize(
    "content",
    [
        b"node1 slots=8\nnode2 slots=8\n",
        b"# master first\n\n  node1\tslots=8   # rack 1\n10.0.0.2 slots=4\n",
        b"node1 slots=8\r\nnode2 slots=8\r\n",
        b"root@node-1.cluster slots=1",
    ],
)
def test_a_good_file_is_read_as_deepspeed_reads_it(content, tmp_path):
    path = tmp_path / "hostfile"
    path.write_bytes(content)
    assert read_hostfile(path) == dict(_parse_hostfile(path.read_text().splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("content", "number", "word"),
    [
        (b"node1 slots=8\n\nNODE1 slots=8\n", 3, "in line 1"),
        (b"node1 slots=0\n", 1, "slots=0"),
        (b"node1 slots=eight\n", 1, "no whole number"),
        (b"node1 slots=-8\n", 1, "no whole number"),
        (b"node1 slots=8x\n", 1, "no whole number"),
        (b"node1\n", 1, "no slots"),
        (b"node1 # slots=8\n", 1, "no slots"),
        (b"node1 slot=8\n", 1, "slots=N"),
        (b"node1 slots = 8\n", 1, "slots=N"),
        (b"node1 slots=8 max_slots=8\n", 1, "max_slots=8"),
        (b"\xef\xbb\xbfnode1 slots=8\n", 1, "byte-order mark"),
        ("node1 slots=8\n".encode("utf-16"), 1, "UTF-16"),
        (b"n\xe4de slots=8\n", 1, "UTF-8"),
        (b"node1:0,2 slots=2\n", 1, "--include"),
        (b"node[1-4] slots=2\n", 1, "line of its own"),
        (b"-oProxyCommand=x slots=2\n", 1, "no host"),
    ],
)
def test_a_bad_line_is_named(content, number, word):
    _, faults = parse_hostfile(content)
    assert len(faults) == 1 and faults[0].startswith(f"line {number}: ") and word in faults[0], faults


@pytest.mark.parametrize("content", [b"", b"\n \n# node1 slots=8\n"])
def test_an_empty_file(content, tmp_path):
    path = tmp_path / "hostfile"
    path.write_bytes(content)
    with pytest.raises(UserError, match="no host in it"):
        read_hostfile(path)


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match=f"--hostfile {path}: cannot be read"):
            read_hostfile(path)
