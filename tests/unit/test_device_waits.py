"""A rank on a GPU waits for others after the collective's call has returned; the stall watch must see that."""

import threading
from datetime import timedelta

import pytest
import torch

from recipes.cluster.stall_watch import StallWatch
from recipes.training.communication_clock import CommunicationClock


class Event:
    """A CUDA event that is reached when the test says so."""

    reached = True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def query(self):
        return Event.reached


@pytest.fixture
def watch():
    """A watch over this thread, without the job's store."""
    watch = object.__new__(StallWatch)
    watch._main_thread = threading.get_ident()
    return watch


def test_a_rank_waits_while_its_gpu_is_inside_a_collective(monkeypatch, watch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    clock = CommunicationClock(torch.device("cuda"))
    monkeypatch.setattr("deepspeed.comm.comm.cdb", None)
    clock.install()
    try:
        assert not watch._is_waiting()
        torch.distributed.barrier()
        monkeypatch.setattr(Event, "reached", False)
        assert watch._is_waiting()
        monkeypatch.setattr(Event, "reached", True)
        assert not watch._is_waiting()
        monkeypatch.setattr(Event, "reached", False)
    finally:
        clock.remove()
    assert not watch._is_waiting(), "a clock that was removed is asked no more"


def test_a_rank_that_has_never_spoken_is_not_waited_for(watch):
    watch._store, watch._ranks = torch.distributed.HashStore(), 3
    watch._store.set_timeout(timedelta(seconds=2))
    watch._store.set("0", "7")
    watch._store.set("2", "-1")
    assert watch._counts() == {0: 7, 1: -1, 2: -1}
    watch._store.set("1", "6")
    assert watch._counts() == {0: 7, 1: 6, 2: -1}
