"""The metrics that have a chart of their own, and how each should look."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChartKind:
    """A chart of the metric `key`; `median` adds a running median, `factor` turns the value into `unit`."""

    key: str
    title: str
    unit: str
    explanation: str
    median: bool = False
    clip: bool = False
    scale: str = "auto"
    factor: float = 1.0


CHART_KINDS = (
    ChartKind(
        "loss",
        "Loss",
        "nats per token",
        "Should fall steeply at first, then ever more slowly, the evaluation close to the training. "
        "Evaluation that rises while training still falls is overfitting.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "eval_loss",
        "Evaluation loss",
        "nats per token",
        "On text that is held out from training. Should fall with the training loss; the lower curve learns better.",
    ),
    ChartKind(
        "eval_bits_per_byte",
        "Evaluation, bits per byte",
        "bits per byte of text",
        "The evaluation loss counted per byte, so that runs with different tokenizers compare. Should fall.",
    ),
    ChartKind(
        "mtp_loss",
        "Multi-token prediction loss",
        "nats per token",
        "The loss on tokens further ahead. Should fall like the main loss and stay somewhat above it.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "eval_mtp_acceptance",
        "Drafts accepted",
        "% of the held-out tokens",
        "How often multi-token prediction's best token is the one that the main model finds best, too: the share of "
        "its drafts that speculative decoding would accept. Should rise; DeepSeek-V3 reports 85 to 90%.",
        factor=100.0,
        scale="linear",
    ),
    ChartKind(
        "balance_loss",
        "Balance loss",
        "part of the loss",
        "The penalty for using the experts unevenly. Should be tiny beside the loss, and level or falling slightly.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "learning_rate",
        "Learning rate",
        "per step",
        "Should follow the schedule: a ramp up, then level or a smooth decay, without a jump at a resume.",
        scale="linear",
    ),
    ChartKind(
        "grad_norm",
        "Gradient norm",
        "before clipping",
        "Should settle after the warm-up. A steady rise, or peaks that grow, come before a run that diverges.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "loss_scale",
        "Loss scale",
        "factor",
        "In fp16 it doubles while all is well and halves at an overflow, whose step is skipped: a few are normal, a "
        "scale that only falls is not. bf16 and fp32 stay at 1.",
        scale="log2",
    ),
    ChartKind(
        "tokens_per_second",
        "Throughput",
        "tokens per second",
        "Should be level. Single dips are checkpoints or waiting for data; a slow decline is a leak or a hot device.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "step_seconds",
        "Step time",
        "seconds",
        "Should be level after the first steps. Peaks are slow storage, evaluation, or one rank that lags.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "mfu",
        "Model FLOPs utilization",
        "% of the device's peak",
        "Share of the device's peak arithmetic that the model itself uses. Should be level; higher is better.",
        median=True,
        clip=True,
        factor=100.0,
    ),
    ChartKind(
        "memory_bytes",
        "Memory",
        "bytes",
        "Should be level after the first few steps. A steady rise is a leak and ends in an out-of-memory error.",
        scale="linear",
    ),
    ChartKind(
        "expert_load_violation",
        "Expert load violation",
        "max / mean - 1",
        "How far the busiest expert is above the mean, in the worst layer. Should fall toward 0, which is even.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "router_entropy",
        "Router entropy",
        "% of no preference",
        "How undecided the routers are among the experts, mean over layers: 100% is no preference at all. Should fall "
        "slowly; a sudden fall is a router that collapses onto a few experts.",
        median=True,
        factor=100.0,
        scale="linear",
    ),
    ChartKind(
        "dead_experts",
        "Idle experts",
        "experts without a token",
        "Experts of all layers together that got no token in a step. Should fall to 0; a step of few tokens leaves "
        "some out by chance.",
        median=True,
        scale="linear",
    ),
    ChartKind(
        "data_wait_seconds",
        "Waiting for data",
        "seconds a step",
        "Of the rank that waited longest. Should be near 0; more asks for more loading processes or a faster disk.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "communication_seconds",
        "Communication",
        "seconds a step",
        "In collectives, waiting for other ranks included, mean over the ranks. Should be level and a small part of "
        "the step time.",
        median=True,
        clip=True,
    ),
    ChartKind(
        "slowest_rank_ratio",
        "Slowest rank",
        "its own time / median",
        "How much longer the slowest rank computes than the median one: all others wait for it. Should stay near 1; "
        "one rank above it for long is a device or a host to look at.",
        median=True,
        clip=True,
        scale="linear",
    ),
)
# Counters are in the summary, or beside the point; numbers by layer are drawn as the heat map of the experts' load.
NOT_CHARTED = {"tokens", "epoch", "skipped_steps", "micro_step", "slowest_rank"}
