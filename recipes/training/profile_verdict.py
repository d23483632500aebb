"""From the profiler's events to a verdict: where the steps' time went, and what to try."""

from collections.abc import Iterable
from typing import Any

# A range in the trace is named "part: attention"; communication is ranged by the clock around each collective.
RANGE_PREFIX = "part: "
PARTS = (
    "attention",
    "experts",
    "router",
    "dense feed-forward",
    "head and loss",
    "embedding",
    "optimizer",
    "communication",
    "data wait",
)
OTHER = "norms and the rest"
BETWEEN = "between operators"  # on a CPU Python at work, on a GPU no kernel running
STEP_RANGE = "ProfilerStep#"  # how TensorBoard's plugin knows a step
_BACKWARD_SCOPE = 1  # torch's RecordScope::BACKWARD_FUNCTION

# part -> (share of the step's time from which on it is worth a word, the word)
ADVICE = {
    "data wait": (0.05, "the loader is late: raise --num_workers, or put the prepared data on a faster disk"),
    "communication": (
        0.2,
        "accumulate more micro-batches a step or enlarge them; a lower ZeRO stage sends less; set overlap_comm. If one "
        "rank is slow (slowest_rank_ratio in metrics.jsonl), the others wait for it here",
    ),
    "optimizer": (
        0.2,
        "a larger global batch means fewer updates a token; ZeRO shares the update out over the ranks; offloading it "
        "and torch_adam slow it down",
    ),
    "head and loss": (0.25, "the vocabulary is large for this model: a smaller tokenizer, or a deeper or wider model"),
    "attention": (0.45, "shorter sequences; or --document_mask off, which lets the fused causal kernel run"),
    "experts": (0.5, "more tokens a micro-batch give each expert's product more rows; or fewer, larger experts"),
    "router": (0.1, "routing costs much beside its experts: larger experts or micro-batches"),
    OTHER: (0.3, "many small operators: larger micro-batches; torch.compile fuses them"),
    BETWEEN: (
        0.25,
        "the host cannot keep up with launching: larger micro-batches, fewer accumulated; no recomputation "
        "(--gradient_checkpointing none) where memory allows",
    ),
}


def part_seconds(events: Iterable[Any], on_gpu: bool) -> dict[str, float]:
    """Seconds in each part, forward and backward together; each moment counts for the innermost range around it.

    A backward operator belongs to the part whose forward made it: torch gives both one sequence number.

    Args:
        events: of torch.profiler.profile.events(). on_gpu: count the kernels' time on the GPU, not the host's.
    """
    events = [event for event in events if event.device_type.name == "CPU"]
    owner: dict[tuple[int, int], str] = {}
    for event in events:  # in the order of time: of several with one number, the last one made the graph's node
        part = _forward_part(event)
        if part and event.sequence_nr >= 0:
            owner[event.thread, event.sequence_nr] = part
    main_threads = {event.thread for event in events if event.name.startswith(RANGE_PREFIX)}
    seconds = dict.fromkeys((*PARTS, OTHER), 0.0)
    for event in events:
        if event.name.startswith(STEP_RANGE[:-1]) or not (on_gpu or event.thread in main_threads):
            continue
        part = _part(event, owner) or OTHER
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds[part] += microseconds / 1e6
    return seconds


def _range_name(event: Any) -> str | None:
    """The part that this event itself is a range of."""
    if event.name.startswith(RANGE_PREFIX):
        return event.name.removeprefix(RANGE_PREFIX)
    return event.name if event.name == "communication" else None


def _forward_part(event: Any) -> str | None:
    while event is not None:
        if event.scope == _BACKWARD_SCOPE:
            return None  # its numbers are its forward's; recomputed forwards have ranges of their own inside it
        if name := _range_name(event):
            return name
        event = event.cpu_parent
    return None


def _part(event: Any, owner: dict[tuple[int, int], str]) -> str | None:
    while event is not None:
        if name := _range_name(event):
            return name
        if event.scope == _BACKWARD_SCOPE:
            # Adding a gradient to the others, and what ZeRO hangs on that, is the optimizer's business.
            default = "optimizer" if "AccumulateGrad" in event.name else None
            part = owner.get((event.fwd_thread, event.sequence_nr), default)
            if part:
                return part
        event = event.cpu_parent
    return None


def top_operators(averages: Iterable[Any], on_gpu: bool, rows: int = 10) -> list[str]:
    """A table of the operators that took the most time themselves, as lines; a GPU's time is its kernels'.

    A kernel is listed under its own name and, with the same time, under the operator that started it: the latter stays.
    """
    times = [
        (average.self_device_time_total if on_gpu else average.self_cpu_time_total, average.count, average.key)
        for average in averages
        if average.device_type.name == "CPU"
        and not average.key.startswith((RANGE_PREFIX, "communication", STEP_RANGE[:-1]))
    ]
    total = sum(time for time, _, _ in times) or 1.0
    lines = [f"{'operator':<52} {'calls':>8} {'ms':>10} {'share':>6}"]
    for time, count, key in sorted(times, reverse=True)[:rows]:
        lines.append(
            f"{key if len(key) <= 52 else key[:49] + '...':<52} {count:>8,} {time / 1e3:>10,.1f} {time / total:>6.1%}"
        )
    return lines


def verdict_lines(seconds: dict[str, float], step_seconds: float, data_wait_seconds: float, on_gpu: bool) -> list[str]:
    """Shares of the steps' time, the largest first, and what to try about those that are too large.

    Args:
        seconds: from `part_seconds`. step_seconds, data_wait_seconds: of the profiled steps together.
    """
    parts = seconds | {"data wait": data_wait_seconds}
    parts[BETWEEN] = max(step_seconds - sum(parts.values()), 0.0)
    shares = {part: value / step_seconds for part, value in parts.items()}
    lines = []
    for part, share in sorted(shares.items(), key=lambda item: -item[1]):
        name = "GPU idle" if part == BETWEEN and on_gpu else part
        lines.append(f"{name:<20} {share:>6.1%}  {'#' * round(40 * share)}")
    advice = [f"{part} {share:.0%}: {ADVICE[part][1]}" for part, share in shares.items() if _is_large(part, share)]
    return [*lines, "what to try", *(advice or ["nothing stands out: the time goes into the model's own products"])]


def _is_large(part: str, share: float) -> bool:
    return part in ADVICE and share >= ADVICE[part][0]
