"""Where the time went: worked by hand on a small trace, and what a person then reads."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from recipes.training.profile_verdict import RANGE_PREFIX, part_seconds, top_operators, verdict_lines


@dataclass
class Event:
    """What the verdict reads of a profiler's event; times in microseconds."""

    name: str
    self_cpu_time_total: float
    cpu_parent: Any = None
    sequence_nr: int = -1
    scope: int = 0
    thread: int = 1
    fwd_thread: int = 1
    self_device_time_total: float = 0.0
    device_type: Any = torch.autograd.DeviceType.CPU


def test_a_backward_operator_belongs_to_the_part_that_made_it():
    step = Event("ProfilerStep#3", 1000)
    attention = Event("part: attention", 10, step)
    cast = Event("aten::to", 1, attention, sequence_nr=7)  # makes no node of its own: the next one gets its number
    product = Event("aten::mm", 20, attention, sequence_nr=7)
    experts = Event("part: experts", 5, step)
    peek = Event("aten::argsort", 3, experts, sequence_nr=8)
    residual = Event("aten::add", 2, step, sequence_nr=8)
    head = Event("part: head and loss", 4, step)
    loss = Event("_CrossEntropyFunction", 30, head, sequence_nr=9)
    loss_backward = Event("evaluate_function: _CrossEntropyFunctionBackward", 6, step, sequence_nr=9, scope=1)
    product_backward = Event("evaluate_function: MmBackward0", 8, step, sequence_nr=7, scope=1)
    inner = Event("aten::mm", 40, product_backward)
    gradient = Event("torch::autograd::AccumulateGrad", 9, step, scope=1)
    send = Event("communication", 50, gradient)
    update = Event("part: optimizer", 11, step)
    adam = Event("Optimizer.step#AdamW.step", 12, update)
    elsewhere = Event("gloo:all_reduce", 500, thread=2)
    seconds = part_seconds(
        [step, attention, cast, product, experts, peek, residual, head, loss, loss_backward, product_backward, inner,
         gradient, send, update, adam, elsewhere], on_gpu=False,
    )  # fmt: skip
    microseconds = {part: round(value * 1e6) for part, value in seconds.items() if value}
    assert microseconds == {
        "attention": 10 + 1 + 20 + 8 + 40,
        "experts": 5 + 3,
        "norms and the rest": 2,
        "head and loss": 4 + 30 + 6,
        "communication": 50,
        "optimizer": 9 + 11 + 12,
    }


class MatrixProducts:
    """An event of a real trace whose time is 1 s for each matrix product: counts do not depend on a machine's load."""

    def __init__(self, event):
        self._event = event

    def __getattr__(self, name):
        return getattr(self._event, name)

    @property
    def self_cpu_time_total(self):
        return 1e6 * (self._event.name in ("aten::mm", "aten::addmm"))


def test_on_a_real_trace_forward_and_backward_are_found_and_nothing_is_counted_twice():
    one, two, three = (torch.nn.Linear(8, 8) for _ in range(3))
    hidden = torch.randn(4, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        with record_function(RANGE_PREFIX + "attention"):
            out = two(one(hidden))
        with record_function(RANGE_PREFIX + "experts"):
            out = three(out[:2])
        out.sum().backward()
    events = list(trace.events())
    counts = part_seconds(map(MatrixProducts, events), on_gpu=False)
    # each layer has one product forward, and one each for the gradients of its input and its weight
    assert {part: count for part, count in counts.items() if count} == {"attention": 6, "experts": 3}
    total = sum(event.self_cpu_time_total for event in events) / 1e6
    assert sum(part_seconds(events, on_gpu=False).values()) == pytest.approx(total)
    table = top_operators(trace.key_averages(), on_gpu=False)
    assert any(line.startswith("aten::addmm ") for line in table)
    assert len(table) <= 11 and max(map(len, table)) <= 80


def test_the_verdict_adds_up_and_says_what_to_try():
    lines = verdict_lines({"attention": 0.5, "communication": 1.0}, 4.0, 1.5, on_gpu=False)
    shares = [line.split("%")[0].rsplit(maxsplit=1) for line in lines[: lines.index("what to try")]]
    assert {name.strip(): float(share) for name, share in shares} == {
        "data wait": 37.5, "communication": 25.0, "between operators": 25.0, "attention": 12.5,
    }  # fmt: skip
    advice = "\n".join(lines[lines.index("what to try") :])
    assert "--num_workers" in advice and "overlap_comm" in advice and "attention" not in advice
    assert len(lines) < 24, "more than a screen"
    assert "GPU idle" in "".join(verdict_lines({"attention": 1.0}, 4.0, 0.0, on_gpu=True))
    assert (
        "nothing stands out" in verdict_lines({"experts": 0.4, "attention": 0.4, "optimizer": 0.1}, 0.9, 0.0, True)[-1]
    )
