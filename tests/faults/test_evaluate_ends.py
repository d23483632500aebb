"""A mistake that one host's rank of evaluate.py finds ends the others, which would wait for it half an hour."""

import time
from concurrent.futures import ThreadPoolExecutor

from chat_facts import conversations, write_untrained
from launching import free_port, run_python


def test_what_one_rank_cannot_find_ends_all(tmp_path):
    write_untrained(tmp_path / "model", conversations()[0])
    (tmp_path / "book.txt").write_text("a fox in a den\n" * 100)
    job = {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port())
    data = ["--data", str(tmp_path / "book.txt"), "--seq_length", "32"]

    def rank(number, checkpoint):
        return run_python(["recipes/evaluate.py", str(checkpoint), *data], RANK=str(number), timeout=120, **job)

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rank, 0, tmp_path / "model")
        second = pool.submit(rank, 1, tmp_path / "nowhere")
        assert second.result().code == 2 and "nowhere: no such folder" in second.result().stderr
        assert first.result().code == 2, first.result().output
    assert time.monotonic() - begin < 100  # two starts and the news; without a guardian rank 0 waits 1,800 s
