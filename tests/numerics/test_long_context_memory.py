"""A step's memory grows with the length of the sequence, not with its square: checkpointing and chunked losses on."""

from itertools import pairwise

from launching import run_python

LENGTHS = (2048, 4096, 8192)


def test_memory_grows_linearly_with_the_sequence():
    words = ["tests/numerics/long_context_memory.py", "full", *map(str, LENGTHS)]
    # freed blocks go back to the system at once, so that the peak is what was held
    finished = run_python(words, PYTHONPATH=".", MALLOC_MMAP_THRESHOLD_="65536")
    assert finished.code == 0, finished.output
    peaks = [int(line) for line in finished.stdout.split()]
    first, second = (later - earlier for earlier, later in pairwise(peaks))
    # Twice as many tokens more take twice as many bytes more; a term of even one float32 score for each pair of
    # positions and head would add 4 * 4 * (8192^2 - 4096^2) bytes = 805 MB to the second and 201 MB to the first.
    assert second / first < 2.2, peaks
    assert first > 30e6, "too small to be told from the allocator's own"
