"""Print the peak memory [bytes] of one step at each length: `long_context_memory.py POLICY LENGTH...`, ascending."""

import dataclasses
import re
import sys
from pathlib import Path

import torch

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM

if __name__ == "__main__":
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    config = dataclasses.replace(
        load_model_config("tiny"), num_hidden_layers=2, rope_scaling=scaling, max_position_embeddings=10240
    )
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    model.set_gradient_checkpointing(sys.argv[1])
    for length in map(int, sys.argv[2:]):
        ids = torch.arange(length).unsqueeze(0) * 7919 % config.vocab_size
        model(ids, ids)["loss"].backward()
        # not getrusage's, which begins with the peak of the process that started this one
        (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        print(int(kib) * 1024)
