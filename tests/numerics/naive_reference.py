"""The architecture once more, in float64, as loops over tokens, heads and experts, written from the papers' equations.

Nothing here is shared with model/: parameters come as a dict of tensors by their names in Hugging Face's layout, and
the configuration as a plain dict in config.json's names. "V3" is arXiv 2412.19437, "V2" arXiv 2405.04434.
"""

import math

import torch


def rms_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def silu(x):
    return x / (1 + torch.exp(-x))


def swiglu(x, gate, up, down):
    return down @ (silu(gate @ x) * (up @ x))


def angles(config, dim):
    """One angle per pair and position; YaRN's NTK-by-parts (arXiv 2309.00071, sec. 3.2) when the config asks for it."""
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if not scaling:
        return plain
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def pair_with(turns):  # the pair whose wavelength fits that often into the original context
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_with(scaling.get("beta_slow", 1))), dim - 1)
    mixed = []
    for i, angle in enumerate(plain):
        ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        mixed.append(angle * (1 - ramp) + angle / factor * ramp)
    return mixed


def magnitude(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rotate(x, position, config):
    """Rotate one vector's pairs: neighbours, or x[i] with x[i + D/2] when rope_interleave is false."""
    dim = x.shape[0]
    scaling = config.get("rope_scaling")
    scale = 1.0
    if scaling:
        scale = magnitude(scaling["factor"], scaling.get("mscale", 1.0)) / magnitude(
            scaling["factor"], scaling.get("mscale_all_dim", 0.0)
        )
    out = [None] * dim
    for i, angle in enumerate(angles(config, dim)):
        a, b = (2 * i, 2 * i + 1) if config.get("rope_interleave", True) else (i, i + dim // 2)
        cos, sin = math.cos(position * angle) * scale, math.sin(position * angle) * scale
        out[a] = x[a] * cos - x[b] * sin
        out[b] = x[b] * cos + x[a] * sin
    return torch.stack(out)


def softmax_scale(config, head_dim):
    scaling = config.get("rope_scaling")
    scale = head_dim**-0.5
    if scaling:
        scale *= magnitude(scaling["factor"], scaling.get("mscale_all_dim", 0.0)) ** 2
    return scale


def attend(queries, keys, values, scale, documents):
    """Causal softmax attention of one head: lists over tokens."""
    outputs = []
    for t, query in enumerate(queries):
        seen = [s for s in range(t + 1) if documents is None or documents[s] == documents[t]]
        logits = torch.stack([query @ keys[s] for s in seen]) * scale
        weights = torch.exp(logits - logits.max())
        weights = weights / weights.sum()
        outputs.append(sum(w * values[s] for w, s in zip(weights, seen, strict=True)))
    return outputs


def latent_attention(config, p, prefix, x, positions, documents=None):
    """V2 eq. 37-47 on one sequence: x (S, H) -> (S, H)."""
    heads, nope, rope, v = (
        config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    rank = config["kv_lora_rank"]
    queries, keys, values = ([[] for _ in range(heads)] for _ in range(3))
    for t in range(x.shape[0]):
        if config.get("q_lora_rank"):
            compressed = rms_norm(p[prefix + "q_a_proj.weight"] @ x[t], p[prefix + "q_a_layernorm.weight"])
            q = p[prefix + "q_b_proj.weight"] @ compressed
        else:
            q = p[prefix + "q_proj.weight"] @ x[t]
        down = p[prefix + "kv_a_proj_with_mqa.weight"] @ x[t]
        latent = rms_norm(down[:rank], p[prefix + "kv_a_layernorm.weight"])
        shared_key = rotate(down[rank:], positions[t], config)
        kv = p[prefix + "kv_b_proj.weight"] @ latent
        for h in range(heads):
            head_q = q[h * (nope + rope) : (h + 1) * (nope + rope)]
            head_kv = kv[h * (nope + v) : (h + 1) * (nope + v)]
            queries[h].append(torch.cat([head_q[:nope], rotate(head_q[nope:], positions[t], config)]))
            keys[h].append(torch.cat([head_kv[:nope], shared_key]))
            values[h].append(head_kv[nope:])
    scale = softmax_scale(config, nope + rope)
    outputs = [attend(queries[h], keys[h], values[h], scale, documents) for h in range(heads)]
    return torch.stack(
        [p[prefix + "o_proj.weight"] @ torch.cat([outputs[h][t] for h in range(heads)]) for t in range(x.shape[0])]
    )


def plain_attention(config, p, prefix, x, positions, documents=None):
    """Standard multi-head attention on one sequence."""
    heads = config["num_attention_heads"]
    dim = x.shape[1] // heads
    q, k, v = ([p[prefix + f"{n}_proj.weight"] @ row for row in x] for n in "qkv")
    outputs = []
    for h in range(heads):
        part = slice(h * dim, (h + 1) * dim)
        outputs.append(
            attend(
                [rotate(row[part], positions[t], config) for t, row in enumerate(q)],
                [rotate(row[part], positions[t], config) for t, row in enumerate(k)],
                [row[part] for row in v],
                softmax_scale(config, dim),
                documents,
            )
        )
    return torch.stack(
        [p[prefix + "o_proj.weight"] @ torch.cat([outputs[h][t] for h in range(heads)]) for t in range(x.shape[0])]
    )


def scores_of(config, p, prefix, x):
    """The affinities of one token with every expert: V3 eq. 15, V2 eq. 22."""
    logits = p[prefix + "gate.weight"] @ x
    if config["scoring_func"] == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    exponentials = torch.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def best(values, count):
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def chosen_experts(config, scores, bias):
    """V3 eq. 16 with node-limited routing (sec. 2.1.2), V2 sec. 2.2.2, or the plain best."""
    count = config["num_experts_per_tok"]
    biased = [
        float(s) + (0.0 if bias is None else float(b))
        for s, b in zip(scores, bias if bias is not None else scores, strict=True)
    ]
    groups = config.get("n_group") or 1
    if groups == 1 or config["topk_method"] == "greedy":
        return best(biased, count)
    size = len(biased) // groups
    of_group = [biased[g * size : (g + 1) * size] for g in range(groups)]
    if config["topk_method"] == "noaux_tc":
        group_scores = [sum(sorted(members)[-2:]) for members in of_group]
    else:
        group_scores = [max(members) for members in of_group]
    kept = best(group_scores, config["topk_group"])
    return sorted((e for g in kept for e in range(g * size, (g + 1) * size)), key=lambda e: -biased[e])[:count]


def mixture(config, p, prefix, x):
    """V3 eq. 12-16 on one token: the output, the scores and the chosen experts."""
    scores = scores_of(config, p, prefix, x)
    chosen = chosen_experts(config, scores.detach(), p.get(prefix + "gate.e_score_correction_bias"))
    weights = [scores[e] for e in chosen]
    if config["norm_topk_prob"]:
        total = sum(weights)
        weights = [w / total for w in weights]
    inner = config["moe_intermediate_size"]
    out = torch.zeros_like(x)
    for expert, weight in zip(chosen, weights, strict=True):
        gate_up = p[prefix + "experts.gate_up_proj"][expert]
        down = p[prefix + "experts.down_proj"][expert]
        out = out + weight * config["routed_scaling_factor"] * swiglu(x, gate_up[:inner], gate_up[inner:], down)
    if config.get("n_shared_experts"):
        out = out + swiglu(x, *(p[prefix + f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")))
    return out, scores, chosen


def decoder_layer(config, p, index, x, positions, documents=None, routed=None):
    """One layer on one sequence; appends (scores, chosen) of every token to `routed`."""
    prefix = f"model.layers.{index}."
    attention = latent_attention if config.get("kv_lora_rank") else plain_attention
    normed = torch.stack([rms_norm(row, p[prefix + "input_layernorm.weight"]) for row in x])
    x = x + attention(config, p, prefix + "self_attn.", normed, positions, documents)
    rows = []
    for row in x:
        normed_row = rms_norm(row, p[prefix + "post_attention_layernorm.weight"])
        if prefix + "mlp.gate.weight" in p:
            out, scores, chosen = mixture(config, p, prefix + "mlp.", normed_row)
            if routed is not None:
                routed.append((scores, chosen))
        else:
            out = swiglu(normed_row, *(p[prefix + f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
        rows.append(row + out)
    return torch.stack(rows)


def final_hidden(config, p, ids, positions=None, documents=None, routed=None):
    """One sequence of token ids -> (S, H) after the final norm. `routed` collects a list for each layer."""
    positions = positions or list(range(len(ids)))
    x = torch.stack([p["model.embed_tokens.weight"][i] for i in ids])
    for index in range(config["num_hidden_layers"]):
        layer_routed = []
        x = decoder_layer(config, p, index, x, positions, documents, layer_routed)
        if routed is not None:
            routed.append(layer_routed)
    return torch.stack([rms_norm(row, p["model.norm.weight"]) for row in x])


def next_depth(config, p, depth, hidden, ids, positions=None, documents=None, routed=None):
    """V3 eq. 21-23 on one sequence: hidden (S', H) of depth k - 1 -> (S - k, H) of depth k, normed."""
    prefix = f"model.layers.{config['num_hidden_layers'] + depth - 1}."
    kept = len(ids) - depth
    positions = positions or list(range(len(ids)))
    rows = []
    for t in range(kept):
        embedded = rms_norm(p["model.embed_tokens.weight"][ids[t + depth]], p[prefix + "enorm.weight"])
        before = rms_norm(hidden[t], p[prefix + "hnorm.weight"])
        rows.append(p[prefix + "eh_proj.weight"] @ torch.cat([embedded, before]))
    layer_routed = []
    x = decoder_layer(
        config,
        p,
        config["num_hidden_layers"] + depth - 1,
        torch.stack(rows),
        positions[:kept],
        documents and documents[:kept],
        layer_routed,
    )
    if routed is not None:
        routed.append(layer_routed)
    return torch.stack([rms_norm(row, p[prefix + "shared_head.norm.weight"]) for row in x])


def head(p):
    return p.get("lm_head.weight", p["model.embed_tokens.weight"])


def logits_of(config, p, ids, positions=None, documents=None):
    return final_hidden(config, p, ids, positions, documents) @ head(p).T


def cross_entropy(logits, label):
    """-log softmax(logits)[label] of one prediction [nats]."""
    highest = logits.max()
    return highest + torch.log(torch.exp(logits - highest).sum()) - logits[label]


def balance_loss(config, routed):
    """V3 eq. 17-20 of one sequence without alpha; routed: (scores, chosen) of every token."""
    experts, count, tokens = config["n_routed_experts"], config["num_experts_per_tok"], len(routed)
    total = 0.0
    for i in range(experts):
        f = sum(experts / (count * tokens) for scores, _ in routed if i in best([float(s) for s in scores], count))
        mean_share = sum(scores[i] / scores.sum() for scores, _ in routed) / tokens
        total = total + f * mean_share
    return total
