"""Plans side by side: the table, the recommendation, and why the others fall."""

from dataclasses import dataclass
from typing import Any

from model.flops import count_parameters
from recipes.cluster.planning import POLICIES, Cluster, Plan, is_offloaded, scaling_law, shortfall
from recipes.config.ds_check import precision, ranks_per_sequence
from recipes.config.ds_config import RunFacts

GB = 1e9
_COLUMNS = (
    "ds_config", "fits", "GB", "weights", "grads", "optim.", "comm.", "act. none", "sel.", "full", "logits", "host",
    "recompute", "micro x acc.", "M tok/step", "GB sent/step", "all-to-all", "tok/s/GPU", "days",
)  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    """What `recipes/plan.py` has to say.

    Args:
        model_name: as the user wrote it.
        plans: one for each ds_config that resolves.
        refused: name of each other ds_config -> its faults.
    """

    model_name: str
    facts: RunFacts
    cluster: Cluster
    plans: list[Plan]
    refused: dict[str, list[str]]

    @property
    def tokens(self) -> float:
        """Of the whole run."""
        if self.facts.train_tokens:
            return self.facts.train_tokens
        return self.plans[0].resolved.batch_plan.tokens_before(self.facts.max_steps or 0) if self.plans else 0

    @property
    def recommended(self) -> Plan | None:
        """The fastest that fits; fp16, or an optimizer in the host's memory, only where nothing else does."""

        def order(plan: Plan) -> tuple[bool, bool, float]:
            return is_offloaded(plan), precision(plan.resolved.config) == "fp16", plan.token_seconds

        return min((plan for plan in self.plans if plan.fits), key=order, default=None)

    def lines(self) -> list[str]:
        """For the terminal."""
        return [*self._heading(), "", *self._table(), "", *self._verdict()]

    def result(self) -> dict[str, Any]:
        """For `--json`."""
        best = self.recommended
        return {
            "model": self.model_name,
            "gpus": self.cluster.gpus,
            "tokens": self.tokens,
            "recommended": best.name if best else None,
            "scaling_law": scaling_law(self.facts.model, self.facts.seq_length, self.tokens),
            "plans": [self._as_dict(plan) for plan in self.plans],
            "refused": self.refused,
        }

    def _heading(self) -> list[str]:
        model, cluster, seq_length = self.facts.model, self.cluster, self.facts.seq_length
        count = count_parameters(model)
        law = scaling_law(model, seq_length, self.tokens)
        return [
            f"{self.model_name}: {count.total / 1e9:.2f}B parameters and {count.mtp / 1e9:.2f}B for multi-token "
            f"prediction, {count.active / 1e9:.2f}B active per token; sequences of {seq_length} tokens",
            f"{cluster.gpus} GPUs of {cluster.gpu_memory_bytes / GB:.0f} GB; {self.tokens / 1e9:,.1f}B tokens at "
            f"{cluster.utilization:.0%} of {cluster.peak_flops / 1e12:.0f} TFLOP/s each",
            f"DeepSeek LLM's scaling law at {law['compute']:.2e} FLOP: lr {law['learning_rate']:.2e}, batch "
            f"{law['batch_tokens'] / 1e6:.1f}M tokens = {law['batch_tokens'] / seq_length:,.0f} sequences"
            + (" (for a dense model of this depth and width)" if model.n_routed_experts else ""),
            "memory of one GPU in GB; activations and logits of one micro-batch, with each recomputation",
        ]

    def _table(self) -> list[str]:
        rows = [list(_COLUMNS), *(self._row(plan) for plan in self.plans)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        return [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]

    def _row(self, plan: Plan) -> list[str]:
        state, resolved = plan.state, plan.resolved
        sizes = [plan.total_bytes, state.weights, state.gradients, state.optimizer, state.communication]
        sizes += [plan.activations[policy].kept + plan.activations[policy].layer for policy in POLICIES]
        sizes += [plan.activations["none"].logits]
        return [
            plan.name,
            "yes" if plan.fits else "NO",
            *(f"{size / GB:.1f}" for size in sizes),
            f"{state.host / GB:.1f}" + (f" + {state.disk / GB:.1f} on disk" if state.disk else ""),
            plan.policy,
            f"{resolved.micro_batch_size} x {resolved.gradient_accumulation_steps}",
            f"{plan.tokens_per_step / 1e6:.2f}",
            f"{plan.communication_bytes / GB:.1f}",
            f"{plan.all_to_all_bytes / GB:.1f}",
            f"{plan.tokens_per_step / plan.step_seconds / self.cluster.gpus:,.0f}",
            f"{plan.days(self.tokens):.1f}",
        ]

    def _verdict(self) -> list[str]:
        best = self.recommended
        lines = []
        if best is None:
            lines.append("none of them fits: take more GPUs, a shorter --seq_length, or a smaller model")
        else:
            flags = f"--deepspeed_config ds_configs/{best.name}.json"
            flags += f" --gradient_checkpointing {best.policy}"
            flags += f" --global_batch_size {best.resolved.global_batch_size}"
            flags += f" --set train_micro_batch_size_per_gpu={best.resolved.micro_batch_size}"
            lines.append(f"recommended: {best.name} ({flags}), {best.total_bytes / GB:.1f} GB, "
                         f"{best.step_seconds:.2f} s a step, {best.days(self.tokens):.1f} days")  # fmt: skip
        for plan in self.plans:
            if plan is not best:
                lines.append(f"  {plan.name}: {self._why_not(plan, best)}")
        lines += [
            f"  {plan.name}: counts whole matrices and sequences on each of the {sharing} ranks that share them; "
            "memory is an upper bound, and the bytes that they exchange are left out"
            for plan in self.plans
            if (sharing := ranks_per_sequence(plan.resolved.config)) > 1
        ]
        for name, faults in self.refused.items():
            lines += [f"  {name}: cannot run here: {fault}" for fault in faults]
        return lines

    def _why_not(self, plan: Plan, best: Plan | None) -> str:
        if not plan.fits or best is None:
            return shortfall(plan, self.cluster)
        if is_offloaded(plan) and not is_offloaded(best):
            return "keeps the optimizer in the host's memory, which others do without"
        if precision(plan.resolved.config) == "fp16" and precision(best.resolved.config) == "bf16":
            return "fp16 needs a loss scale and skips steps, and bf16 fits as well"
        slower = plan.token_seconds / best.token_seconds - 1
        if slower < 0.005:
            return "as fast"
        reasons = []
        if POLICIES.index(plan.policy) > POLICIES.index(best.policy):
            reasons.append(f"recomputes more ({plan.policy})")
        sent, least = (x.communication_bytes / x.tokens_per_step / 1e3 for x in (plan, best))
        if sent > least * 1.005:
            reasons.append(f"sends {sent:,.0f} kB a token, not {least:,.0f}")
        return f"{slower:.0%} slower: {', '.join(reasons)}"

    def _as_dict(self, plan: Plan) -> dict[str, Any]:
        state = plan.state
        return {
            "ds_config": plan.name,
            "fits": plan.fits,
            "total_bytes": plan.total_bytes,
            "weights_bytes": state.weights,
            "gradients_bytes": state.gradients,
            "optimizer_bytes": state.optimizer,
            "communication_buffers_bytes": state.communication,
            "host_bytes": state.host,
            "disk_bytes": state.disk,
            "activations_bytes": {p: a.kept + a.layer for p, a in plan.activations.items()},
            "logits_bytes": plan.activations["none"].logits,
            "gradient_checkpointing": plan.policy,
            "micro_batch_size": plan.resolved.micro_batch_size,
            "gradient_accumulation_steps": plan.resolved.gradient_accumulation_steps,
            "ranks_per_sequence": ranks_per_sequence(plan.resolved.config),  # above 1: memory is an upper bound
            "tokens_per_step": plan.tokens_per_step,
            "sent_bytes_per_step": plan.communication_bytes,
            "all_to_all_bytes_per_step": plan.all_to_all_bytes,
            "step_seconds": plan.step_seconds,
            "days": plan.days(self.tokens),
        }
