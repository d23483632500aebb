"""One optimizer step: every token of the global batch weighs the same, and the expert bias moves once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.losses import IGNORE_INDEX
from model.moe import iter_routers, update_expert_bias
from recipes.training.group_norms import group_norms
from recipes.training.loss_scale import UpdateControl


@dataclass
class StepResult:
    """What one optimizer step did, over all ranks."""

    loss: float  # main cross-entropy [nats per valid token]
    mtp_loss: float  # mean over depths [nats per valid token]; 0 without MTP
    balance_loss: float  # sequence-wise balance loss, alpha included
    label_tokens: int  # tokens with a loss, over the global batch
    learning_rate: float  # of this step's update
    grad_norm: float  # before clipping; inf when the step was skipped
    applied: bool  # False: the update was left out
    finite: bool  # False: the loss or a gradient was not, so the update was left out
    loss_scale: float  # that the gradients were made with; 1.0 outside fp16
    loss_denominator: float  # of each micro-batch's loss [tokens]
    source_losses: list[float]  # main cross-entropy by source [nats per token]; nan where the step had none of it
    expert_load: dict[str, list[float]]  # router -> share of its tokens by expert
    router_entropy: dict[str, float]  # router -> mean entropy of its tokens' affinities [nats]
    votes: list[float]  # what the ranks had to say beside training, each summed over them
    grad_norms: dict[str, float] = field(default_factory=dict)  # before clipping, by kind of parameter, on request


def train_step(
    engine: Any,
    control: UpdateControl,
    micro_batches: list[dict[str, Tensor]],
    bias_update_speed: float,
    source_ids: Tensor,
    num_sources: int,
    votes: Callable[[], Sequence[float]] = tuple,
    *,
    leave_out: Callable[[float], bool] = lambda loss: False,
    log_group_norms: bool = False,
) -> StepResult:
    """Run all micro-batches of one optimizer step through the engine.

    Args:
        engine: the DeepSpeed engine.
        control: of this engine's updates.
        micro_batches: this rank's, `gradient_accumulation_steps` of them, on the engine's device.
        bias_update_speed: gamma of the balancing bias [bias units per optimizer step].
        source_ids: (micro-steps, micro_batch_size) int64, which source each sequence is from.
        num_sources: sources of the run.
        votes: asked at the end of the step; its numbers travel with the losses, so agreeing costs no message more.
        leave_out: asked with the step's loss before the update, on every rank alike; True leaves the update out.
        log_group_norms: also give the gradient's norm by kind of parameter.
    """
    copies = torch.distributed.get_world_size() // engine.dp_world_size  # ranks that have the same sequences
    labels = sum((batch["labels"] != IGNORE_INDEX).sum() for batch in micro_batches)
    label_tokens = int(_all_reduce(torch.as_tensor(labels, device=engine.device))) // copies
    # DeepSpeed averages gradients over ranks and micro-batches; dividing each sum by the mean label count of a
    # micro-batch makes that average the sum over the global batch divided by all its labels.
    denominator = max(label_tokens, 1) / (engine.dp_world_size * len(micro_batches))

    learning_rate = engine.get_lr()[0]  # engine.step() moves the schedule on
    loss_scale = control.loss_scale
    by_source = torch.zeros(2, num_sources, device=engine.device, dtype=torch.float64)  # nats, tokens
    sums = torch.zeros(4, device=engine.device, dtype=torch.float64)
    for batch, sources in zip(micro_batches, source_ids.to(engine.device), strict=True):
        output = engine(**batch, loss_denominator=denominator)
        engine.backward(output["loss"])
        sums += torch.stack(
            [
                output["cross_entropy_sum"].double(),
                output["mtp_cross_entropy_sum"].sum().double(),
                output["mtp_label_count"].sum().double(),
                output["balance_loss"].double(),
            ]
        )
        by_source[0].index_add_(0, sources, output["sequence_cross_entropy_sum"].double())
        by_source[1].index_add_(0, sources, (batch["labels"] != IGNORE_INDEX).sum(dim=1).double())
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    sums = _all_reduce(torch.cat([sums, torch.tensor(votes(), device=engine.device, dtype=torch.float64)]))
    _all_reduce(by_source)
    loss, mtp_loss, mtp_label_tokens, balance_loss = (sums[:4] / copies).tolist()
    loss /= max(label_tokens, 1)

    norm = _unpartitioned_grad_norm(engine)
    norms = group_norms(engine, loss_scale) if log_group_norms else {}
    finite = all(map(math.isfinite, (loss, mtp_loss, balance_loss, norm or 0.0)))
    unwanted = finite and leave_out(loss)
    control.step(leave_out=unwanted or not finite)
    applied = bool(engine.was_step_applied())
    grad_norm = engine.get_global_grad_norm() if norm is None else norm
    expert_load, router_entropy = balance_experts(engine.module, bias_update_speed if applied else 0.0, copies)
    return StepResult(
        loss=loss,
        mtp_loss=mtp_loss / max(mtp_label_tokens, 1),
        balance_loss=balance_loss / (engine.dp_world_size * len(micro_batches)),
        label_tokens=label_tokens,
        learning_rate=learning_rate,
        grad_norm=float(grad_norm) if applied and grad_norm is not None else float("inf"),
        applied=applied,
        finite=finite and (applied or (unwanted and not control.overflowed)),
        loss_scale=loss_scale,
        loss_denominator=denominator,
        source_losses=(by_source[0] / by_source[1]).tolist(),
        expert_load=expert_load,
        router_entropy=router_entropy,
        votes=sums[4:].tolist(),
        grad_norms=norms,
    )


def _all_reduce(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor)
    return tensor


def _unpartitioned_grad_norm(engine: Any) -> float | None:
    """The gradient's norm in fp32 at ZeRO stage 0, where DeepSpeed keeps none and applies even NaN; else None."""
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    return float(torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None]))


@torch.no_grad()
def balance_experts(
    model: torch.nn.Module, speed: float, copies: int = 1
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Move every router's bias once, from the counts of the whole global batch, and start counting anew.

    Args:
        speed: gamma [bias units per optimizer step]; 0 leaves the bias alone (a skipped step).
        copies: ranks that have counted the same tokens.
    Returns:
        For each router the share of tokens by expert, summing to 1, and its tokens' mean entropy of affinities [nats].
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    routers = dict(iter_routers(model))
    if not routers:
        return {}, {}
    # One message for all layers, (L, E + 1): counts, exact in float64, and the entropy's sum. Every rank gets the same
    # sums and so the same bias.
    taken = [router.take_counts() for router in routers.values()]
    message = torch.stack([torch.cat([counts.double(), entropy.double().view(1)]) for counts, entropy in taken])
    _all_reduce(message).div_(copies)
    counts_LE, entropy_L = message[:, :-1].to(torch.int64), message[:, -1]
    for router, counts in zip(routers.values(), counts_LE, strict=True):
        if speed and router.e_score_correction_bias is not None:  # V2's kind of router has no bias
            update_expert_bias(router.e_score_correction_bias, counts, speed)
    choices_L1 = counts_LE.sum(dim=1, keepdim=True).clamp(min=1)
    shares_LE = counts_LE.double() / choices_L1
    top_k_L = torch.tensor([router.top_k for router in routers.values()], device=message.device)
    mean_entropy_L = entropy_L * top_k_L / choices_L1.squeeze(1)
    return dict(zip(routers, shares_LE.tolist(), strict=True)), dict(zip(routers, mean_entropy_L.tolist(), strict=True))
