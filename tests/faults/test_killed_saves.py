"""Whatever moment of a save a rank is killed at, and when the disk is full, the newest complete checkpoint loads."""

import pytest
from launching import run_python


@pytest.mark.timeout(300)
def test_killed_at_forty_moments_of_a_save(tmp_path):
    done = run_python(["tests/faults/saving_ranks.py", str(tmp_path)], timeout=280)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("trial")]) == 40
    assert int(lines[-1].split()[0]) >= 5, f"too few kills hit a save, so little was tested: {lines[-1]}"
    assert "could not write it" in done.stderr  # the full disk was met, and named
    print(done.stdout)
