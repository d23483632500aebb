"""What one GPU gives: tokens/s, MFU and memory of `small` and of a slice of V2-Lite, against transformers, in turn.

    python benchmarks/gpu.py [--dtypes bf16 fp16] [--out benchmarks/results/gpu.md]

Same weights, tokens and ds_configs/1gpu_*.json for both sides; made to end within ten minutes on one 80 GB GPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch

from benchmarks.train_step import JOB, compare
from benchmarks.training_worker import DTYPES
from model.config import load_model_config
from recipes.training.device_peak import device_peak_flops

# Layers of V2-Lite that fit twice with their optimizer, for both sides are there at once (24 GB planned a side); no MTP
# and no balance loss, for transformers trains neither.
MODELS: dict[str, dict[str, Any]] = {
    "small": {"seq_length": 1024, "micro_batch": 16, "fields": {}},
    "v2_lite": {"seq_length": 4096, "micro_batch": 2, "fields": {"num_hidden_layers": 2}},
}


def rows(name: str, dtype: str, rounds: int, steps: int) -> list[str]:
    """Two lines of the table, ours and transformers'."""
    shape = MODELS[name]
    fields = {"num_nextn_predict_layers": 0, "balance_loss_alpha": 0.0, **shape["fields"]}
    job = JOB | {
        "model": load_model_config(name).to_dict() | fields,
        "dtype": dtype,
        "seq_length": shape["seq_length"],
        "micro_batch": shape["micro_batch"],
    }
    peak = device_peak_flops(torch.device("cuda", 0), DTYPES[dtype])
    lines = []
    for result in compare(job, ["grouped_mm"], rounds, steps):
        mfu = result["gflops_per_second"] * 1e9 / peak
        agree = f"{result['loss_difference']:.1e}"
        lines.append(
            f"| {name} | {dtype} | {result['name']} | {result['tokens_per_second']:,.0f} | {mfu:.1%} "
            f"| {result['peak_bytes'] / 1e9:.1f} | {agree} |"
        )
    return lines


def main() -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16"], default=["bf16", "fp16"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: torch sees no CUDA device; benchmarks/train_step.py measures on a CPU", file=sys.stderr
        )
        return 2
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [
        f"Commit {commit.strip()}, one {torch.cuda.get_device_name()}, torch {torch.__version__}.",
        "",
        "| model | dtype | side | tokens/s | MFU | peak GB allocated | losses differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in arguments.models:
        for dtype in arguments.dtypes:
            lines += rows(name, dtype, arguments.rounds, arguments.steps)
            print("\n".join(lines), flush=True)
            arguments.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
