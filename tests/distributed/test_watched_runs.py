"""Two ranks watched: 500 clean steps that grow nowhere, a planted leak, a planted slow rank, and a profile."""

import json
import math
import time

import pytest
from launching import metrics, run_ranks

LEAK_BYTES = 512 << 10  # a step
MIB = 1 << 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_corpus, small_model):
    """Name -> folder of each run; and, as "output", what rank 0 and rank 1 wrote on the console."""
    folder = tmp_path_factory.mktemp("watched")
    # several micro-batches, ZeRO 2 and 3: collectives in the backward pass, and asynchronous ones
    kinds = {
        "clean": ("none", 500, "--save_steps 100 --log_level debug --set zero_optimization.stage=1"),
        "leak": ("leak", 140, "--set zero_optimization.stage=1"),
        "slow": ("slow", 8, "--set zero_optimization.stage=3 csv_monitor.enabled=true"),
        "profiled": (
            "none",
            12,
            "--profile 8:10 --gradient_checkpointing selective --set zero_optimization.stage=2",
        ),
    }
    listing = []
    for name, (plant, steps, more) in kinds.items():
        words = (
            f"--deepspeed_config ds_configs/cpu.json --model {small_model} --data {small_corpus} --seq_length 32 "
            f"--max_steps {steps} --global_batch_size 4 --output_dir {folder / name} {more}"
        ).split()
        if name == "slow":
            words += [f"csv_monitor.output_path={folder / 'slow' / 'csv'}", "csv_monitor.job_name=job"]
        listing.append({"plant": plant, "arguments": words})
    (folder / "runs.json").write_text(json.dumps(listing))
    begin = time.time()
    finished = run_ranks(["tests/distributed/train_watched.py", str(folder / "runs.json")], ranks=2)
    found = {name: folder / name for name in kinds}
    return found | {"output": finished, "seconds": time.time() - begin}


def events(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


def test_memory_is_flat_after_step_50_and_the_watcher_is_silent(runs):
    lines = metrics(runs["clean"])
    assert len(lines) == 500
    assert events(runs["clean"], "memory_growth") == []
    rss = [line["host_rss_bytes"] for line in lines]
    # evaluation and checkpoints come on the way, whose first use may take a little; a leak of 1 KiB a step would be 0.5
    assert max(rss[50:]) - rss[50] < 16 * MIB
    assert all(line["memory_bytes"] >= line["host_rss_bytes"] > 50 * MIB for line in lines)


@pytest.mark.parametrize("rank", (0, 1))
def test_nothing_piles_up(runs, rank):
    notes = json.loads((runs["clean"].parent / f"notes_{rank}.json").read_text())
    first, *later = notes.values()
    for note in later:
        for kind in ("open files", "shared memory", "threads"):
            assert note[kind] <= first[kind], kind
    assert notes["250"]["files"] == notes["450"]["files"] == notes["490"]["files"]


@pytest.mark.parametrize("rank", (0, 1))
def test_the_logs_of_every_rank_rotate(runs, rank):
    files = sorted((runs["clean"] / "logs").glob(f"rank_0000{rank}.log*"))
    assert len(files) == 4 and all(file.stat().st_size <= 20_000 for file in files)
    newest = files[0].read_text().splitlines()
    assert f"rank {rank} INFO finished 500 steps" in newest[-1]
    assert "step 499: own_seconds" in "".join(newest)


def test_a_leak_is_warned_of_with_its_rank_and_slope(runs):
    found = events(runs["leak"], "memory_growth")
    assert (
        found and {event["rank"] for event in found} == {1} and {event["memory"] for event in found} == {"host memory"}
    )
    # allocators round up and keep some pages themselves
    assert found[0]["bytes_per_1000_steps"] == pytest.approx(1000 * LEAK_BYTES, rel=0.1)
    console = runs["output"][0].stderr
    assert "the host memory of rank 1 grows steadily, by" in console and "MiB per 1,000 steps" in console
    assert "grows steadily" in (runs["leak"] / "logs" / "rank_00001.log").read_text()
    assert runs["output"][1].stderr.count("grows steadily") == 0, "more than one rank speaks"


def test_the_slow_rank_is_named_and_the_others_wait_in_collectives(runs):
    lines = metrics(runs["slow"])[2:]
    assert {line["slowest_rank"] for line in lines} == {1}
    for line in lines:
        assert line["slowest_rank_ratio"] > 1.3
        # rank 0 waits 0.2 s, rank 1 does not: 0.1 s in the mean, and what is sent besides
        assert 0.08 < line["communication_seconds"] < line["step_seconds"]


def test_csv_and_tensorboard_get_what_metrics_jsonl_has(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = metrics(runs["slow"])
    (table,) = (runs["slow"] / "csv").rglob("train_communication_seconds.csv")
    rows = [row.split(",") for row in table.read_text().split()[1:]]
    assert [(int(step), float(value)) for step, value in rows] == [
        (n["step"], n["communication_seconds"]) for n in lines
    ]
    (job,) = {path.parent for path in (runs["slow"] / "tensorboard").rglob("events*")}
    events = EventAccumulator(str(job))
    events.Reload()
    layer = "model.layers.1.mlp.gate"
    for name, values in (
        ("train/router_entropy", [line["router_entropy"] for line in lines]),
        (f"train/expert_load_violation_by_layer/{layer}", [n["expert_load_violation_by_layer"][layer] for n in lines]),
    ):
        # TensorBoard keeps float32
        assert [event.value for event in events.Scalars(name)] == pytest.approx(values, rel=1e-6)


def test_the_experts_and_tokens_of_a_line(runs):
    for line in metrics(runs["clean"])[::50]:
        layers = {f"model.layers.{index}.mlp.gate" for index in (1, 2, 3)}
        assert set(line["router_entropy_by_layer"]) == set(line["expert_load_percentiles"]) == layers
        assert 0 < line["router_entropy"] <= 1
        assert line["dead_experts"] == sum(share == 0 for shares in line["expert_load"].values() for share in shares)
        # 4 sequences of 32 tokens, all of which have a label
        assert line["tokens_per_second_with_padding"] == pytest.approx(4 * 32 / line["step_seconds"])
        assert line["tokens_per_second"] <= line["tokens_per_second_with_padding"] * (1 + 1e-9)
    (evaluation,) = metrics(runs["clean"], evaluation=True)
    assert 0 < evaluation["eval_mtp_acceptance"] < 1


def test_the_profile_is_a_trace_a_table_and_a_verdict(runs):
    folder = runs["profiled"] / "profile"
    (path,) = folder.glob("*.pt.trace.json")  # the name that TensorBoard's plugin looks for
    trace = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [
        f"ProfilerStep#{step}" for step in (8, 9, 10)
    ]
    # 3 main layers and 1 of MTP; of one micro-batch of 2 sequences a rank
    counts = {name: names.count(f"part: {name}") for name in ("attention", "experts", "head and loss", "optimizer")}
    assert counts["attention"] == 3 * 4 and counts["head and loss"] == counts["optimizer"] == 3
    assert counts["experts"] == 2 * 3 * 3, "MoE blocks are recomputed, so they run twice"
    assert names.count("communication") > 3
    verdict = (folder / "verdict.txt").read_text()
    assert verdict in runs["output"][0].stdout
    lines = verdict.splitlines()
    assert len(lines) <= 40, "more than a screen"
    shares = {}
    for line in lines[
        next(n for n, line in enumerate(lines) if line.startswith("where")) + 1 : lines.index("what to try")
    ]:
        name, share = line.split("%")[0].rsplit(maxsplit=1)
        shares[name.strip()] = float(share)
    for part in ("attention", "experts", "head and loss", "optimizer", "communication"):
        assert shares[part] > 0, part
    assert "data wait" in shares
    assert math.isclose(sum(shares.values()), 100, abs_tol=1.5)  # rounded to 0.1 each
    assert "profile" not in runs["output"][0].stdout.split("to go on")[-1], "a resumed run would not take these steps"
