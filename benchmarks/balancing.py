"""How the balancing bias evens the experts' load, as plots and a table.

    python benchmarks/balancing.py corpus      tiny on the default corpus, gamma 0, 0.001 and 0.01
    python benchmarks/balancing.py skewed      8 experts on tokens of which ten ids make half, and what damps the swing

Load is the most loaded expert's tokens over the mean; 1 is even. The corpus runs go through recipes/pretrain.py.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from model.config import ModelConfig, load_model_config
from model.moe import iter_routers, update_expert_bias
from model.transformer import DeepseekForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
LAST_STEPS = 50


def corpus_loads(gamma: float, steps: int, folder: Path) -> dict[str, list[float]]:
    """Max over mean load of each step for each layer, from a pre-training run of the tiny model."""
    config = load_model_config("tiny").to_dict() | {"bias_update_speed": gamma}
    model = folder / f"gamma_{gamma}.json"
    model.write_text(json.dumps(config))
    run = folder / f"run_{gamma}"
    words = f"recipes/pretrain.py --model {model} --max_steps {steps} --output_dir {run} --save_steps {steps}".split()
    subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    loads: dict[str, list[float]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for layer, shares in line.get("expert_load", {}).items():
            loads.setdefault(layer, []).append(max(shares) * len(shares))
    return loads


def sign_step(bias: Tensor, counts: Tensor, gamma: float, step: int) -> None:
    """DeepSeek-V3's rule."""
    update_expert_bias(bias, counts, gamma)


def centred_step(bias: Tensor, counts: Tensor, gamma: float, step: int) -> None:
    """The sign's step less its mean over the experts, so that the biases do not drift together."""
    delta = gamma * torch.sign(counts.float().mean() - counts.float())
    bias += delta - delta.mean()


def proportional_step(bias: Tensor, counts: Tensor, gamma: float, step: int) -> None:
    """As far as the load is off, at most gamma: small where the load is nearly even."""
    mean = counts.float().mean()
    bias += gamma * ((mean - counts.float()) / mean).clamp(-1, 1)


def decaying_step(bias: Tensor, counts: Tensor, gamma: float, step: int) -> None:
    """V3's rule with gamma falling as one over the square root of the step."""
    update_expert_bias(bias, counts, gamma / (1 + step) ** 0.5)


RULES: dict[str, tuple[Callable[[Tensor, Tensor, float, int], None], float]] = {
    "no bias": (sign_step, 0.0),
    "sign, gamma 0.001 (V3)": (sign_step, 0.001),
    "sign, gamma 0.01": (sign_step, 0.01),
    "centred sign, gamma 0.01": (centred_step, 0.01),
    "proportional, gamma 0.01": (proportional_step, 0.01),
    "sign, gamma 0.05 / sqrt(step)": (decaying_step, 0.05),
}


# (learning rate, initializer_range): with the first the scores of all tokens run together, and no rule can part them;
# with the second they stay apart, and what damps the swing shows.
SKEWED_SETTINGS = {"collapsing": (2e-3, 0.02), "spread": (3e-4, 0.06)}


def skewed_loads(
    rule: Callable[[Tensor, Tensor, float, int], None], gamma: float, steps: int, setting: str
) -> dict[str, list[float]]:
    """Train 8 experts, top-2 of 1 of 2 groups, on independent tokens of which ten ids make half."""
    learning_rate, initializer_range = SKEWED_SETTINGS[setting]
    torch.set_num_threads(1)  # the shapes are too small to gain from more
    config = dataclasses.replace(
        load_model_config("tiny"),
        **{"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_nextn_predict_layers": 0},
        **{"intermediate_size": 128, "moe_intermediate_size": 64, "max_position_embeddings": 64},
        **{"initializer_range": initializer_range},
    )
    assert isinstance(config, ModelConfig)
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    loads: dict[str, list[float]] = {}
    for step in range(steps):
        rare = torch.randint(10, config.vocab_size, (16, 65), generator=generator)
        common = torch.randint(0, 10, (16, 65), generator=generator)
        tokens = torch.where(torch.rand(16, 65, generator=generator) < 0.5, common, rare)
        model(tokens[:, :-1], tokens[:, 1:])["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _, router in iter_routers(model):
                counts = router.tokens_per_expert
                loads.setdefault(setting, []).append(float(counts.max() / counts.float().mean()))
                if gamma:
                    rule(router.e_score_correction_bias, counts, gamma, step)
                counts.zero_()
    return loads


def draw(loads: dict[str, dict[str, list[float]]], title: str, path: Path) -> None:
    """One panel for each layer, one line for each setting."""
    layers = list(next(iter(loads.values())))
    figure, axes = plt.subplots(1, len(layers), figsize=(4.2 * len(layers), 3.6), sharey=True, squeeze=False)
    for axis, layer in zip(axes[0], layers, strict=True):
        for setting, by_layer in loads.items():
            axis.plot(range(1, len(by_layer[layer]) + 1), by_layer[layer], label=setting, linewidth=1)
        axis.set(title=layer, xlabel="optimizer step")
        axis.axhline(1.0, color="grey", linewidth=0.5)
    axes[0][0].set_ylabel("most loaded expert / mean")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def table(loads: dict[str, dict[str, list[float]]]) -> str:
    """Mean of max / mean load over the last steps, and the range that it swings in."""
    lines = [
        f"| rule | run | mean of the last {LAST_STEPS} steps | lowest to highest there |",
        "|---|---|---|---|",
    ]
    for setting, by_layer in loads.items():
        for layer, values in by_layer.items():
            last = values[-LAST_STEPS:]
            mean = sum(last) / len(last)
            lines.append(f"| {setting} | {layer} | {mean:.3f} | {min(last):.2f} to {max(last):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Run one of the two and write its plot and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["corpus", "skewed"])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    if arguments.which == "corpus":
        with tempfile.TemporaryDirectory() as folder:
            loads = {
                f"gamma {gamma}": corpus_loads(gamma, arguments.steps, Path(folder)) for gamma in (0.0, 0.001, 0.01)
            }
    else:
        loads = {}
        for name, (rule, gamma) in RULES.items():
            loads[name] = {}
            for setting in SKEWED_SETTINGS:
                loads[name] |= skewed_loads(rule, gamma, arguments.steps, setting)
    draw(loads, f"Expert load, {arguments.which}", RESULTS / f"balancing_{arguments.which}.png")
    text = table(loads)
    (RESULTS / f"balancing_{arguments.which}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
