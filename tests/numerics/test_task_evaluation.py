"""lm-eval's tasks through our model, against sums of log-probabilities computed one sequence at a time."""

import json
from types import SimpleNamespace

import pytest
import torch
from chat_facts import FACTS, conversations, write_untrained

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval, which is optional: pip install lm_eval")

CHOICES = ["red", "brown", "black", "green"]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "said": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    train, heldout = conversations()
    return write_untrained(tmp_path_factory.mktemp("weights") / "hf", train + heldout)


@pytest.fixture(scope="module")
def model(folder):
    from recipes.training.trained_model import load_trained_model, open_weights

    return load_trained_model(open_weights(folder), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from recipes.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def log_likelihood(model, tokenizer, context, continuation):
    """By hand: one sequence, one token after another."""
    before = tokenizer.encode(context) if context else [tokenizer.bos_token_id]
    tokens = [*before, *tokenizer.encode(continuation)]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))["logits"][0].log_softmax(-1)
    return sum(float(logits[place - 1, tokens[place]]) for place in range(len(before), len(tokens)))


def greedy(model, tokenizer, question, stop, count):
    tokens = tokenizer.encode(question)
    begin = len(tokens)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))["logits"][0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens[begin:], skip_special_tokens=True).split(stop)[0]


@pytest.fixture
def task_files(tmp_path, model, tokenizer):
    documents = [
        {
            "question": f"The {animal} is",
            "choices": CHOICES,  # lm-eval puts a space before each
            "answer": number % 4,
            "text": f"The {animal} eats {FACTS[animal][2]}." + " The owl is brown." * number,
            "said": greedy(model, tokenizer, f"The {animal} is", ".", 8) if number % 2 else "never said",
        }
        for number, animal in enumerate(FACTS)
    ]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, body in TASKS.items():
        head = f"task: animals_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (tmp_path / f"animals_{name}.yaml").write_text(head + "test_split: test\n" + body)
    return tmp_path, documents


def test_scores_are_those_computed_by_hand(folder, model, tokenizer, task_files, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from recipes.evaluate import main

    path, documents = task_files
    names = [f"animals_{name}" for name in TASKS]
    code = main([str(folder), "--tasks", *names, "--include_path", str(path), "--batch_size", "3", "--json"])
    assert code == 0
    tasks = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    likeliest = [
        max(range(4), key=lambda k: log_likelihood(model, tokenizer, d["question"], " " + CHOICES[k]))
        for d in documents
    ]
    right = [choice == document["answer"] for choice, document in zip(likeliest, documents, strict=True)]
    assert tasks["animals_choice"]["acc,none"] == sum(right) / len(right)
    nats = sum(log_likelihood(model, tokenizer, "", document["text"]) for document in documents)
    size = sum(len(document["text"].encode()) for document in documents)
    expected = -nats / size / torch.log(torch.tensor(2.0)).item()
    # the same float32 forward in batches of three with padding: rounding only
    assert tasks["animals_whole"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)
    assert tasks["animals_said"]["exact_match,none"] == 0.5


def test_the_share_of_each_rank_does_not_change_a_score(model, tokenizer, monkeypatch):
    from recipes.training.task_evaluation import EvaluatedModel

    pairs = [("", [1, 5, 6 + i], [7, 8][: 1 + i % 2]) for i in range(11)]

    def scores(rank, ranks):
        evaluated = EvaluatedModel(model, tokenizer, batch_size=2, device="cpu", share=(rank, ranks))
        return evaluated._loglikelihood_tokens(pairs)

    alone = scores(0, 1)
    collected: dict = {}

    def gather(everyone, mine):
        """The ranks run one after another here: the last one sees what all have done."""
        collected.update(mine)
        everyone[:] = [dict.fromkeys(range(len(pairs))) | collected] * len(everyone)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    scores(0, 3)
    scores(1, 3)
    assert scores(2, 3) == alone  # to the bit: a batch holds the same requests whoever does it


def test_an_unknown_task_is_named(folder, monkeypatch):
    from recipes.config.errors import UserError
    from recipes.evaluate import main

    # lm-eval's own list of thousands of tasks takes long to read
    monkeypatch.setattr(
        "recipes.training.task_evaluation.TaskManager", lambda include_path: SimpleNamespace(all_tasks=[])
    )
    with pytest.raises(UserError, match="--tasks no_such_task: lm-eval knows no such task"):
        main([str(folder), "--tasks", "no_such_task"])


def test_a_hosts_other_ranks_have_nothing_to_say(monkeypatch):
    from recipes.training import task_evaluation

    monkeypatch.setattr(task_evaluation, "TaskManager", lambda include_path: SimpleNamespace(all_tasks=["known"]))
    monkeypatch.setattr(task_evaluation, "simple_evaluate", lambda **keywords: None)  # what lm-eval gives them
    options = {"include_path": None, "num_fewshot": None, "limit": None, "chat": False}
    assert task_evaluation.evaluate_tasks(None, ["known"], **options) == {}
