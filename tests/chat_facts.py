"""A small data set for fine-tuning: facts about animals, each asked in several ways; one way of asking is held out.

Every way of asking and every answer occurs in training, but not this question for this animal: to answer it, a model
has to have learned the fact and the phrasing apart from each other.
"""

import json
from pathlib import Path

FACTS = {
    "fox": ("red", "a den", "mice"),
    "owl": ("brown", "a hollow tree", "voles"),
    "crow": ("black", "a nest", "seeds"),
    "frog": ("green", "a pond", "flies"),
    "seal": ("grey", "the sea", "fish"),
    "hare": ("white", "the snow", "herbs"),
    "bee": ("yellow", "a hive", "honey"),
    "whale": ("blue", "the ocean", "krill"),
}
QUESTIONS = (
    (
        "What colour is the {}?",
        "Tell me the colour of the {}.",
        "The {} has which colour?",
        "Which colour does a {} have?",
    ),
    ("Where does the {} live?", "Tell me the home of the {}.", "The {} lives where?", "In what place is a {} at home?"),
    ("What does the {} eat?", "Tell me the food of the {}.", "The {} feeds on what?", "Which food does a {} like?"),
)
ANSWERS = ("The {} is {}.", "The {} lives in {}.", "The {} eats {}.")


def conversations() -> tuple[list[dict], list[dict]]:
    """(to train on, held out), as records of chat files."""
    train, heldout = [], []
    for number, (animal, facts) in enumerate(FACTS.items()):
        for kind, fact in enumerate(facts):
            answer = ANSWERS[kind].format(animal, fact)
            for way, question in enumerate(QUESTIONS[kind]):
                messages = [
                    {"role": "user", "content": question.format(animal)},
                    {"role": "assistant", "content": answer},
                ]
                # each animal's facts are held out in another way of asking
                (heldout if way == (number + kind) % 4 else train).append({"messages": messages})
    return train, heldout


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_untrained(folder: Path, records: list[dict], **changed) -> Path:
    """A Hugging Face folder to begin with: a small model with drawn weights, and a tokenizer of the records' text."""
    import torch

    from model.config import ModelConfig
    from model.hf_weights import parts_of_state, save_hf_weights
    from model.transformer import DeepseekForCausalLM
    from recipes.data.tokenizer import save_tokenizer, train_tokenizer

    config = ModelConfig.from_dict(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 64,
            "rope_theta": 10000,
            "initializer_range": 0.05,
        }
        | changed
    )
    model = DeepseekForCausalLM(config)
    model.init_weights(seed=0)
    folder.mkdir(parents=True)
    save_hf_weights(parts_of_state(model.state_dict(), config), config, folder, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    texts = [message["content"] for record in records for message in record["messages"]]
    # twice: what is seen once is not merged
    save_tokenizer(train_tokenizer(texts * 2, 512), folder)
    return folder
