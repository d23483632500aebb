"""One rank of one side of a training comparison: builds the model under DeepSpeed, then takes steps when it is told to.

A line of JSON on standard input gives the job, each further line the number of steps to take; after each it writes a
line of JSON with their losses, seconds and peak memory. The line "profile" takes one step and gives its operators'
seconds. So two sides can take turns, each in its own process group.
"""

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed

PARTS = ("forward", "backward", "optimizer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# dtype -> the repository's file for one device of the kind that is here
DS_CONFIGS = (
    {"bf16": "1gpu_bf16", "fp16": "1gpu_fp16"} if torch.cuda.is_available() else {"fp32": "cpu", "bf16": "cpu_bf16"}
)


def bench_batch(step: int, rank: int, job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tokens drawn by Zipf's law, (B, S) each; a function of the step and the rank, so all sides see the same."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    shape = (job["micro_batch"], job["seq_length"] + 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    tokens = (torch.exp(uniform * torch.log(torch.tensor(float(job["model"]["vocab_size"])))) - 1).long()
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def ds_config(job: dict[str, Any]) -> dict[str, Any]:
    """The same for both sides: the repository's own for this device and dtype, with the bench's batch and rate."""
    path = Path(__file__).parents[1] / "ds_configs" / f"{DS_CONFIGS[job['dtype']]}.json"
    config = json.loads(path.read_text())
    config |= {
        "train_batch_size": job["micro_batch"] * job["ranks"],
        "train_micro_batch_size_per_gpu": job["micro_batch"],
        "gradient_accumulation_steps": 1,
    }
    config["optimizer"]["params"] |= {"lr": 1e-4, "torch_adam": True, "fused": True}
    if config["zero_optimization"].get("contiguous_gradients") == "auto":
        config["zero_optimization"]["contiguous_gradients"] = False  # what the recipe makes of it on a CPU
    config["timers"] = {"throughput": {"enabled": False}}  # it would wait for the whole GPU in each micro-batch
    del config["scheduler"], config["tensorboard"]
    return config


def our_model(job: dict[str, Any], seed: int = 1) -> torch.nn.Module:
    """Ours, with the weights that both sides begin with."""
    from model.transformer import DeepseekForCausalLM

    model = DeepseekForCausalLM(ModelConfig.from_dict(job["model"]))
    model.init_weights(seed)
    model.set_gradient_checkpointing(job["checkpointing"])
    return model


def their_model(job: dict[str, Any]) -> torch.nn.Module:
    """transformers' class with our weights."""
    import transformers

    ours = our_model(job)
    family = "DeepseekV3" if ours.config.model_type == "deepseek_v3" else "DeepseekV2"
    config = getattr(transformers, f"{family}Config")(**ours.config.to_dict(), use_cache=False)
    config._experts_implementation = job["experts"]
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.load_state_dict(ours.state_dict())
    if job["checkpointing"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Parts:
    """Seconds of a step's parts, by wrapping the engine's three calls; the device is waited for at each boundary."""

    def __init__(self, engine: Any) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device = engine.device
        for part, name in (("forward", "forward"), ("backward", "backward"), ("optimizer", "step")):
            setattr(engine, name, self._timed(part, getattr(engine, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            begin = self.now()
            result = function(*args, **keywords)
            self.seconds[part] += self.now() - begin
            return result

        return timed

    def now(self) -> float:
        """The clock, once the device has done what it was told [s]."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def our_step(engine: Any, job: dict[str, Any]) -> Callable[[dict[str, torch.Tensor]], float]:
    """The recipe's whole optimizer step, with all that it counts; gamma 0, since transformers moves no bias."""
    from recipes.training.loss_scale import UpdateControl
    from recipes.training.step import train_step

    control = UpdateControl(engine)
    sources = torch.zeros(1, job["micro_batch"], dtype=torch.int64)
    return lambda batch: train_step(engine, control, [batch], 0.0, sources, 1).loss


def their_step(engine: Any) -> Callable[[dict[str, torch.Tensor]], float]:
    """The plain loop that a user of transformers would write."""

    def step(batch: dict[str, torch.Tensor]) -> float:
        # the labels are shifted already; without shift_labels the class would shift them once more
        loss = engine(input_ids=batch["input_ids"], labels=batch["labels"], shift_labels=batch["labels"]).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def reset_peak(device: torch.device) -> None:
    """Start the peak anew at what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Most memory held since `reset_peak`: allocated on a GPU, resident on a CPU [bytes]."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def operator_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Seconds in each operator itself while `run` runs: on a GPU its kernels', on a CPU its own."""
    with torch.profiler.profile() as profile:
        run()
    on_gpu = torch.cuda.is_available()
    return {
        event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        for event in profile.key_averages()
    }


def main() -> None:
    """Read the job, build, and take steps."""
    job, rank = json.loads(sys.stdin.readline()), int(os.environ["RANK"])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print does not enter the answers
    torch.set_num_threads(job["threads"])
    quiet_deepspeed()
    import deepspeed

    from recipes.cluster.launch import read_launch, start_process_group
    from recipes.training.communication_clock import CommunicationClock
    from recipes.training.optimizer import parameter_groups

    start_process_group(read_launch(), ds_config(job))
    model = our_model(job) if job["side"] == "ours" else their_model(job)
    groups = parameter_groups(model.named_parameters(), 0.1)
    if job["side"] == "transformers":  # a group for each weight decay, as its Trainer makes them
        groups = [
            {"params": [p for g in groups if g["weight_decay"] == decay for p in g["params"]], "weight_decay": decay}
            for decay in (0.1, 0.0)
        ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config(job))
    if job["side"] == "ours":
        from recipes.training.engine import compile_layers, share_float32_weights
        from recipes.training.grouped_products import choose_grouped_products

        share_float32_weights(engine)
        choose_grouped_products(engine.device)
        if job["compile"]:
            compile_layers(engine.module)
    step = our_step(engine, job) if job["side"] == "ours" else their_step(engine)
    parts, clock = Parts(engine), CommunicationClock(engine.device)
    clock.install()

    def batch_on_device(number: int) -> dict[str, torch.Tensor]:
        return {key: value.to(engine.device) for key, value in bench_batch(number, rank, job).items()}

    number = 0
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        if line.strip() == "profile":
            print(json.dumps(operator_seconds(functools.partial(step, batch_on_device(number)))), file=out, flush=True)
            number += 1
            continue
        reset_peak(engine.device)
        losses, seconds, shares = [], [], []
        for _ in range(int(line)):
            batch = batch_on_device(number)
            clock.take_seconds()
            parts.seconds = dict.fromkeys(PARTS, 0.0)
            begin = parts.now()
            losses.append(step(batch))
            seconds.append(parts.now() - begin)
            shares.append({**parts.seconds, "communication": clock.take_seconds()})
            number += 1
        answer = {"losses": losses, "seconds": seconds, "parts": shares, "peak_bytes": peak_bytes(engine.device)}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
