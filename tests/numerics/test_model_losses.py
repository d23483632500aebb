"""Cross-entropy, multi-token prediction and balance loss equal float64 loops, gradients included; the loss's memory."""

import subprocess
import sys
from pathlib import Path

import naive_reference as naive
import pytest
import torch
from model_cases import V2_LITE, V3, build_model, random_ids, relative_difference

import model.losses as losses
from model.losses import IGNORE_INDEX, LMHead
from model.moe import sequence_balance_loss
from model.mtp import shifted_labels

TOLERANCE = 1e-9  # float64 on both sides
LENGTH = 8


def naive_losses(values, p, ids, labels, documents, denominator):
    """The whole loss by loops, differentiable; and (sum, count) for the main prediction and each depth."""
    depths = values["num_nextn_predict_layers"]
    sums, counts = [0.0] * (depths + 1), [0] * (depths + 1)
    balance = 0.0
    for row, row_labels, row_documents in zip(ids.tolist(), labels.tolist(), documents, strict=True):
        routed = []
        hidden = naive.final_hidden(values, p, row, documents=row_documents, routed=routed)
        for depth in range(depths + 1):
            if depth:
                hidden = naive.next_depth(values, p, depth, hidden, row, documents=row_documents, routed=routed)
            for t in range(len(row) - depth):
                label = row_labels[t + depth]
                # Depth k predicts token t + 1 + k, within the document of t.
                last = min(t + 1 + depth, len(row) - 1)
                if label == IGNORE_INDEX or (depth and row_documents and row_documents[t] != row_documents[last]):
                    continue
                sums[depth] = sums[depth] + naive.cross_entropy(naive.head(p) @ hidden[t], label)
                counts[depth] += 1
        for layer in routed:
            if layer:
                balance = balance + naive.balance_loss(values, layer) / len(ids)
    balance = values["balance_loss_alpha"] * balance
    loss = sums[0] / denominator + balance
    for depth in range(1, depths + 1):
        loss = loss + values["mtp_loss_weight"] / depths * sums[depth] / denominator
    return loss, sums, counts, balance


@pytest.mark.parametrize("depths", [0, 1, 2])
@pytest.mark.parametrize("with_documents", [False, True])
def test_the_whole_loss_and_every_gradient(depths, with_documents):
    values = V3 | {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": depths,
        "balance_loss_alpha": 0.5,
        "mtp_loss_weight": 0.3,
    }
    model = build_model(values, torch.float64)
    ids, labels = random_ids(2, LENGTH), random_ids(2, LENGTH, seed=2)
    labels[0, 3], labels[1, 0] = IGNORE_INDEX, IGNORE_INDEX
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [4, 4, 5, 5, 5, 5, 6, 6]]) if with_documents else None
    documents = document_ids.tolist() if with_documents else [None, None]
    output = model(ids, labels, document_ids=document_ids, loss_denominator=20.0)
    output["loss"].backward()

    p = {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in model.state_dict().items()}
    loss, sums, counts, balance = naive_losses(values, p, ids, labels, documents, 20.0)
    loss.backward()
    assert relative_difference(output["loss"], loss) <= TOLERANCE
    assert relative_difference(output["cross_entropy_sum"], sums[0]) <= TOLERANCE
    assert relative_difference(output["balance_loss"], balance) <= TOLERANCE
    assert output["label_count"].item() == counts[0]
    assert output["mtp_label_count"].tolist() == counts[1:]
    for ours, theirs in zip(output["mtp_cross_entropy_sum"], sums[1:], strict=True):
        assert relative_difference(ours, theirs) <= TOLERANCE
    for name, parameter in model.named_parameters():
        assert relative_difference(parameter.grad, p[name].grad) <= TOLERANCE, name


def test_the_denominator_is_this_batch_by_default():
    model = build_model(V3 | {"num_hidden_layers": 1})
    ids, labels = random_ids(2, LENGTH), random_ids(2, LENGTH, seed=2)
    labels[0, :5] = IGNORE_INDEX
    output = model(ids, labels)
    assert output["label_count"].item() == 2 * LENGTH - 5
    assert output["loss"].item() == pytest.approx(output["cross_entropy_sum"].item() / (2 * LENGTH - 5), rel=1e-6)
    as_tensor = model(ids, labels, loss_denominator=torch.tensor(22.0))
    assert as_tensor["loss"].item() == pytest.approx(output["cross_entropy_sum"].item() / 22, rel=1e-6)


def test_labels_that_are_all_ignored_give_zero_and_no_nan():
    model = build_model(V3 | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1})
    output = model(random_ids(1, LENGTH), torch.full((1, LENGTH), IGNORE_INDEX))
    output["loss"].backward()
    assert output["loss"].item() == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_shifted_labels_by_hand():
    labels = torch.tensor([[1, 2, 3, 4, 5]])  # the ids were 0, 1, 2, 3, 4
    assert shifted_labels(labels, None, 1).tolist() == [[2, 3, 4, 5]]
    assert shifted_labels(labels, None, 2).tolist() == [[3, 4, 5]]
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    # Depth 1: token 2 for t=0; token 3 is another document for t=1 and t=2; token 5 for t=3 only its label can tell.
    assert shifted_labels(labels, documents, 1).tolist() == [[2, IGNORE_INDEX, IGNORE_INDEX, 5]]
    assert shifted_labels(labels, documents, 2).tolist() == [[IGNORE_INDEX] * 3]


def test_a_sequence_too_short_for_the_depth_is_refused():
    model = build_model(V3 | {"num_hidden_layers": 1, "num_nextn_predict_layers": 2})
    with pytest.raises(ValueError, match="too short"):
        model(random_ids(1, 2), random_ids(1, 2))


@pytest.mark.parametrize(
    ("device", "table", "rows", "element_bytes", "expected"),
    [
        ("cuda", (129_280, 7_168), 8_192, 2, (8_192, 259)),  # V3 with one MTP depth: 2.1 GB of logits, not 3.7 of sums
        ("cuda", (102_400, 2_048), 8_192, 2, (8_192, 327)),  # V2-Lite: 5,242 rows and 4,096 more
        ("cuda", (102_400, 2_048), 16_384, 2, (5_242, 327)),
        ("cuda", (102_400, 2_048), 8_192, 4, (5_242, 327)),  # float32 is summed in place
        ("cpu", (16_384, 512), 2_048, 2, (512, 256)),
        ("cpu", (64, 16), 10, 4, (10, 10)),
    ],
)
def test_how_many_rows_of_logits_are_held(device, table, rows, element_bytes, expected):
    assert losses.rows_at_a_time(device, torch.Size(table), rows, element_bytes) == expected


@pytest.mark.parametrize("rows", [(1, 1), (10, 4), (23, 5), (256, 256)])
def test_chunks_do_not_change_the_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(losses, "rows_at_a_time", lambda *_: rows)
    generator = torch.Generator().manual_seed(0)
    head = LMHead(16, 61).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(61, 16, generator=generator))
    hidden = torch.randn(23, 16, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 61, (23,), generator=generator)
    labels[4] = IGNORE_INDEX
    total, sums = head(hidden, labels, [13, 10], [1.0, 0.15])
    (total * 3).backward()
    weight = head.weight.detach().clone().requires_grad_()
    twin = hidden.detach().clone().requires_grad_()
    expected = [
        sum(naive.cross_entropy(weight @ twin[t], labels[t]) for t in part if labels[t] != IGNORE_INDEX)
        for part in (range(13), range(13, 23))
    ]
    ((expected[0] + 0.15 * expected[1]) * 3).backward()
    assert relative_difference(sums, torch.stack(expected)) <= TOLERANCE
    assert relative_difference(hidden.grad, twin.grad) <= TOLERANCE
    assert relative_difference(head.weight.grad, weight.grad) <= TOLERANCE


def test_balance_loss_of_padded_sequences():
    """Padding enters neither counts nor means: as if the sequences had been cut; a sequence of padding is left out."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(3, 7, 8, generator=generator, dtype=torch.float64)
    indices = scores.topk(3).indices
    valid = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 7]).bool()
    values = {"n_routed_experts": 8, "num_experts_per_tok": 3}
    expected = sum(naive.balance_loss(values, [(s, None) for s in scores[b, :n]]) for b, n in ((0, 7), (1, 4))) / 2
    assert relative_difference(sequence_balance_loss(scores, indices, valid), expected) <= TOLERANCE


def test_balance_loss_bounds():
    """1 when every expert is named alike, E / K when the same K always are."""
    even = torch.eye(8).repeat(1, 1)[None]
    assert sequence_balance_loss(even, even.topk(1).indices).item() == pytest.approx(1)
    skewed = torch.zeros(1, 8, 8)
    skewed[..., :2] = 0.5
    assert sequence_balance_loss(skewed, skewed.topk(2).indices).item() == pytest.approx(4)


def test_softmax_models_have_the_balance_loss_too():
    model = build_model(V2_LITE | {"balance_loss_alpha": 0.001, "num_hidden_layers": 2})
    loss = model(random_ids(2, LENGTH), random_ids(2, LENGTH))["balance_loss"].item()
    assert 0.0005 < loss < 0.001 * 8 / 3


_MEMORY_SCRIPT = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {root!r})
from model.losses import LMHead

def peak():  # not ru_maxrss: a process inherits its parent's
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

torch.set_num_threads(2)
head = LMHead(512, 129280).to(getattr(torch, {dtype!r}))
with torch.no_grad():
    head.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
hidden = torch.randn(4096, 512, dtype=head.weight.dtype).requires_grad_()
labels = torch.randint(0, 129280, (4096,))
(torch.randn(256, 256, dtype=head.weight.dtype) @ torch.randn(256, 256, dtype=head.weight.dtype)).sum()
before = peak()
total, _ = head(hidden, labels, [4096], [1.0])
(total / 4096).backward()
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_loss(dtype):
    """Vocabulary 129,280, 4,096 tokens, hidden 512, forward and backward: at most 1.5 GB above weights and inputs.

    Whole float32 logits alone would be 2.1 GB. The peak resident memory of a process of its own; the gradients count.
    """
    root = str(Path(__file__).resolve().parents[2])
    script = _MEMORY_SCRIPT.format(root=root, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    above = int(done.stdout)
    print(f"{dtype}: {above / 1e6:.0f} MB above the weights")
    assert above < 1.5e9


@pytest.mark.parametrize("with_documents", [False, True])
def test_accepted_drafts_are_those_of_speculative_decoding(with_documents):
    """Prefix by prefix, as a decoder would go: the first depth drafts the token after the next one, and the main model,
    given the next one, finds the same token best. Only drafts with a target count."""
    values = V3 | {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    model = build_model(values, torch.float64)
    with torch.no_grad():  # random weights never agree; a depth that only passes on what it joins sometimes does
        model.model.layers[2].eh_proj.weight[:, values["hidden_size"] :] += torch.eye(values["hidden_size"])
    ids, labels = random_ids(6, LENGTH), random_ids(6, LENGTH, seed=2)
    labels[0, 2] = IGNORE_INDEX
    documents = [[0] * 3 + [1] * (LENGTH - 3)] * 6 if with_documents else [None] * 6
    p = dict(model.state_dict())
    accepted = drafts = 0
    for row, row_labels, row_documents in zip(ids.tolist(), labels.tolist(), documents, strict=True):
        for t in range(LENGTH - 1):
            last = min(t + 2, LENGTH - 1)
            if row_labels[t + 1] == IGNORE_INDEX or (row_documents and row_documents[t] != row_documents[last]):
                continue
            prefix, prefix_documents = row[: t + 2], row_documents and row_documents[: t + 2]
            hidden = naive.final_hidden(values, p, prefix, documents=prefix_documents)
            deeper = naive.next_depth(values, p, 1, hidden, prefix, documents=prefix_documents)
            draft = (naive.head(p) @ deeper[t]).argmax()
            verified = (naive.head(p) @ hidden[t + 1]).argmax()
            accepted += int(draft == verified)
            drafts += 1
    model.eval()
    more = {"document_ids": torch.tensor(documents)} if with_documents else {}
    with torch.no_grad():
        output = model(ids, labels, **more)
    assert 0 < accepted < drafts, "nothing was told apart"
    assert (output["mtp_accepted_count"], output["mtp_label_count"][0]) == (accepted, drafts)
    model.train()
    assert "mtp_accepted_count" not in model(ids, labels, **more)
