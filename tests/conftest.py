"""What every test shares: the repository's root on sys.path, and an environment without a network."""

import json
import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny shapes gain nothing from threads, which on a shared machine cost much; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def pytest_collection_modifyitems(items):
    """GPU tests say why they do not run here."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory):
    """A prepared corpus of real text, 384 token ids, ready in a second; a few thousand tokens of it are held out."""
    from recipes.data.prepare import prepare

    source = Path(json.__file__).parent
    texts = tmp_path_factory.mktemp("texts")
    for path in [*source.glob("*.py"), *(source.parent / "asyncio").glob("[a-l]*.py")]:
        (texts / path.name).write_text(path.read_text())
    output = tmp_path_factory.mktemp("prepared") / "small"
    return prepare([str(texts)], output, vocab_size=384, num_proc=1, show_progress=False)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A config.json of every part of the architecture at the least width: MLA with q-LoRA, MoE in groups, MTP."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 64,
        "rope_theta": 10000,
        "initializer_range": 0.02,
    }
    path = tmp_path_factory.mktemp("model") / "small_test.json"
    path.write_text(json.dumps(config))
    return path
