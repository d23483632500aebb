"""The report's page: its numbers against a run worked by hand, its charts, and what must not break it."""

import json
import math
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from recipes.config.errors import UserError
from recipes.training.report import read_run, summarise, write_report
from recipes.training.report.expert_map import render_expert_maps
from recipes.training.report.line_chart import Chart, Series, render_chart, running_median, thin_out
from recipes.training.report.number_text import duration, linear_ticks, log_ticks, short_number, tick_labels

CHARTS = (
    "loss eval_bits_per_byte mtp_loss balance_loss learning_rate grad_norm loss_scale tokens_per_second step_seconds "
    "mfu memory_bytes expert_load_violation"
).split()
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page; fails on a tag that is not closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.ids = [], [], []
        self.scripts, self.cells, self.rows = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "tr" in self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data

    def row(self, label):
        return next(row[1:] for row in self.rows if row and row[0] == label)

    def plot_data(self):
        return [json.loads(script) for script in self.scripts if script.startswith("{")]


def training_line(step, **changes):
    line = {
        "step": step, "tokens": 1000 * step, "loss": 4.0 - 0.5 * step, "mtp_loss": 5.0 - 0.5 * step,
        "balance_loss": 1e-4, "learning_rate": 1e-3 * step, "grad_norm": 1.0, "loss_scale": 65536.0,
        "skipped_steps": 0, "step_seconds": 2.0, "tokens_per_second": 500.0 + step, "mfu": 0.25,
        "memory_bytes": 3 * 2**30, "expert_load_violation": 0.5, "epoch": 0,
        "expert_load": {"model.layers.1.mlp.gate": [0.5, 0.3, 0.2, 0.0]},
    }  # fmt: skip
    return line | changes


def write_run(folder, lines, max_steps=5, ds_config=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"arguments": {"model": "tiny", "max_steps": max_steps}}))
    (folder / "ds_config.json").write_text(json.dumps(ds_config or {"fp16": {"enabled": True}}))
    return folder


@pytest.fixture
def worked_run(tmp_path):
    """Four steps of five: an overflow at step 3, then a crash, and steps 3 and 4 again from step 2."""
    lines = [
        training_line(1),
        training_line(2),
        {"step": 2, "eval_loss": 3.25, "eval_bits_per_byte": 1.5},
        training_line(3, loss=50.0, memory_bytes=9 * 2**30),
        {"event": "resume", "step": 2, "world_size": 2},
        training_line(3, loss=2.75, skipped_steps=1, loss_scale=32768.0, step_seconds=4.0),
        {"event": "spike", "step": 3, "loss": 2.75, "action": "warn"},
        training_line(4, loss=2.0, skipped_steps=1, loss_scale=32768.0),
        {"step": 4, "eval_loss": 3.5, "eval_bits_per_byte": 1.625},
    ]
    return write_run(tmp_path / "worked", lines)


def page_of(runs, tmp_path):
    return Page(write_report(runs, tmp_path / "out" / "report.html").read_text(encoding="utf-8"))


def test_the_summary_of_the_worked_run(worked_run):
    summary = summarise(read_run(worked_run))
    assert (summary.steps, summary.max_steps, summary.tokens, summary.loss) == (4, 5, 4000, 2.0)
    assert (summary.eval_loss, summary.best_eval_loss, summary.best_step) == (3.5, 3.25, 2)
    assert summary.eval_bits_per_byte == 1.625
    assert summary.training_seconds == 10.0  # 2 + 2 + 4 + 2; the abandoned third step does not count
    assert summary.tokens_per_second == 502.5  # median of 501 to 504
    assert summary.peak_memory_bytes == 3 * 2**30
    assert (summary.skipped_steps, summary.spikes, summary.resumes, summary.non_finite_losses) == (1, 1, 1, 0)


def test_the_page_of_the_worked_run(worked_run, tmp_path):
    page = page_of([worked_run], tmp_path)
    assert page.row("Steps") == ["4 of 5"]
    assert page.row("Tokens") == ["4000"]
    assert page.row("Training loss, last") == ["2.0000"]
    assert page.row("Evaluation loss, last") == ["3.5000"]
    assert page.row("Bits per byte, last") == ["1.6250"]
    assert page.row("Best evaluation loss") == ["3.2500, step 2"]
    assert page.row("Training time") == ["10 s"]
    assert page.row("MFU, median") == ["25%"]
    assert page.row("Memory, peak") == ["3 GiB"]
    assert page.row("arguments.model") == ["tiny"]
    assert page.row("fp16.enabled") == ["true"]
    events = [row for row in page.rows if len(row) == 3]
    assert ["2", "resume", "world_size 2"] in events
    assert ["3", "spike", "loss 2.75, action warn"] in events
    assert any(row[:2] == ["3", "skipped"] for row in events)
    assert set(page.ids) >= {f"chart-{key}" for key in CHARTS} | {"expert-load", "events", "configuration"}


def test_the_curves_of_the_worked_run(worked_run, tmp_path):
    text = write_report([worked_run], tmp_path / "report.html").read_text(encoding="utf-8")
    plots = {plot["series"][0]["name"]: plot["series"] for plot in Page(text).plot_data() if "series" in plot}
    assert plots["training"][0]["x"] == [1, 2, 3, 4]
    assert plots["training"][0]["y"] == [3.5, 3.0, 2.75, 2.0]
    assert plots["training"][1] == {"name": "evaluation", "x": [2, 4], "y": [3.25, 3.5]}
    assert text.count('class="s dots') == 2  # evaluation and bits per byte are few points: each is shown
    assert plots["Model FLOPs utilization"][0]["y"] == [25.0] * 4
    assert plots["memory"][0]["y"] == [3.0] * 4  # GiB
    scale = text[text.index('id="chart-loss_scale"') : text.index('id="chart-tokens_per_second"')]
    assert re.findall(r'class="sign (\w+)" style="[^"]+" title="([^"]+)"', scale) == [
        ("resume", "resume at step 2"), ("spike", "spike at step 3"), ("skip", "step 3: 1 skipped, scale 32.77k"),
    ]  # fmt: skip


def test_a_line_is_drawn_where_its_axis_says():
    """x 0..100 lies 1% inside the plot's 1000 units; y 10..20 has 6% of its range (0.6) above and below."""
    chart = Chart("k", "T", "u", "e", [Series("s", np.array([0, 50, 100]), np.array([10.0, math.nan, 20.0]), 0)])
    path = re.search(r'class="s line c0 d0" d="([^"]+)"', render_chart(chart)).group(1)
    assert path == "M9.8 378.6h0M990.2 21.4h0"  # 1000 * 1/102; 400 * (1 - 0.6/11.2); two lone points around a gap


def test_nothing_is_fetched(worked_run, tmp_path):
    text = write_report([worked_run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes), (tag, attributes)


def test_every_chart_is_explained_and_spoken(worked_run, tmp_path):
    text = write_report([worked_run], tmp_path / "report.html").read_text(encoding="utf-8")
    for figure in re.findall(r'<figure class="chart.*?</figure>', text, flags=re.S):
        assert re.search(r'class="unit">\[[^\]]+\]', figure)
        assert re.search(r'aria-label="[^"]+ from [^"]+"', figure)
        assert re.search(r'<p class="explain">.*Should|<p class="explain">In fp16', figure)


def test_several_runs_share_charts_and_stand_side_by_side(worked_run, tmp_path):
    other = write_run(
        tmp_path / "other",
        [training_line(1, loss=1.5, tokens=5000), training_line(2, loss=1.0, tokens=9000)],
        ds_config={"fp16": {"enabled": False}},
    )
    page = page_of([worked_run, other], tmp_path)
    assert page.row("") == ["worked", "other"]
    assert page.row("Training loss, last") == ["2.0000", "1.0000best"]
    assert page.row("Evaluation loss, last") == ["3.5000", "–"]
    assert page.row("fp16.enabled") == ["true", "false"]
    assert [row[0] for row in page.rows].count("fp16.enabled") == 2  # where the runs differ, and among all keys
    assert [row[0] for row in page.rows].count("arguments.model") == 1
    assert {"chart-eval_loss", "chart-loss_over_tokens"} <= set(page.ids)
    loss, over_tokens = (plot for plot in page.plot_data() if "series" in plot and plot["series"][0]["y"][0] == 3.5)
    assert [series["name"] for series in loss["series"]] == ["worked", "other"]
    assert over_tokens["series"][1] == {"name": "other", "x": [5000, 9000], "y": [1.5, 1.0]}


def test_hostile_names_stay_text(tmp_path):
    evil = "</script><b onclick=x>'\"&"
    lines = [training_line(step, **{evil: step, "expert_load": {evil: [1, 2], "b": [1]}}) for step in (1, 2)]
    folder = write_run(tmp_path / "a", [*lines, {"event": evil, "step": 1, evil: evil}], ds_config={evil: evil})
    for runs in ([folder], [folder, folder]):
        page = page_of(runs, tmp_path)
        assert not [attributes for _, attributes in page.elements if "onclick" in attributes]
        assert page.row(evil)[0] == evil
        assert len(page.scripts) == len(page.plot_data()) + 1


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "loss": 2.0}],
        [{"step": 7, "eval_loss": 2.0}],
        [{"step": 1, "loss": None}, {"step": 2, "loss": None}],
        [{"step": step, "loss": loss} for step, loss in enumerate((0.0, -1e308, 1e308, 5e-324, 1.0))],
        [{"step": step, "loss": 1.0, "loss_scale": 0.0, "mfu": None} for step in range(400)],
        [{"step": step, "loss": 10.0 ** (step % 40), "grad_norm": 1.0 + 1e-12 * step} for step in range(400)],
        [{"step": 2**40, "loss": 3.0, "memory_bytes": 0, "tokens": None}, {"step": 2**40 + 1, "loss": 3.0}],
        [{"step": 1, "loss": 1.0, "expert_load": {"a": [1], "b": [1, 2]}}, {"step": 2, "expert_load": {"b": [3, 4]}}],
    ],
)
def test_odd_runs_still_give_a_page(tmp_path, lines):
    folder = write_run(tmp_path / "a", lines)
    assert page_of([folder], tmp_path).row("Steps")
    assert page_of([folder, folder], tmp_path).row("Steps")


def test_a_run_of_100_000_steps_is_small_and_quick(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, 100_000)
    shares = {f"model.layers.{layer}.mlp.gate": rng.dirichlet(np.ones(64)).round(4).tolist() for layer in range(1, 5)}
    lines = [training_line(i + 1, loss=3.0 + x, grad_norm=1.0 + x, other=x) for i, x in enumerate(noise)]
    for i, line in enumerate(lines):
        line["expert_load"] = shares if i % 10 == 0 else None
    lines[61_803]["loss"] = 9.0
    folder = write_run(tmp_path / "long", lines)
    start = time.process_time()
    output = write_report([folder], tmp_path / "report.html")
    assert time.process_time() - start < 10  # what a user waits for; CPU time, so that a busy machine does not fail it
    assert output.stat().st_size < 3_000_000
    loss = next(plot for plot in Page(output.read_text(encoding="utf-8")).plot_data() if "series" in plot)
    assert loss["series"][0]["y"][loss["series"][0]["x"].index(61_804)] == 9.0  # no peak is lost


def test_thinning_keeps_the_ends_and_every_extreme():
    x = np.arange(10_000)
    y = np.sin(x / 50.0)
    y[1234], y[8765], y[5000:5100] = 7.0, -7.0, np.nan
    thin_x, thin_y = thin_out(x, y, 400)
    assert len(thin_x) <= 402
    assert {0, 1234, 8765, 9999} <= set(thin_x.tolist())
    assert np.isnan(thin_y).any()  # a stretch without values stays a gap


def test_the_running_median_passes_over_a_peak():
    y = np.array([1.0, 2.0, 100.0, 3.0, np.nan, 5.0, 4.0])
    x, medians = running_median(np.arange(7), y, window=3, points=7)
    assert x.tolist() == list(range(7))
    assert medians.tolist() == [1.5, 2.0, 3.0, 51.5, 4.0, 4.5, 4.5]


def test_the_heat_map_of_two_steps(tmp_path):
    """4 experts: shares 0.5, 0.3, 0.2, 0 are 2, 1.2, 0.8 and 0 times the mean."""
    lines = [training_line(1), training_line(2, expert_load={"model.layers.1.mlp.gate": [0.25] * 4})]
    text = render_expert_maps(read_run(write_run(tmp_path / "a", lines)))
    data = json.loads(re.search(r"<script[^>]*>(.*?)</script>", text).group(1))
    assert data["percent"] == [[200, 100], [120, 100], [80, 100], [0, 100]]
    assert "layer 1" in text
    paths = dict(re.findall(r'class="h(\d)" d="([^"]+)"', text))
    assert paths == {"5": "M0 0.5h1", "3": "M1 0.5h1M0 1.5h2M0 2.5h2M1 3.5h1", "0": "M0 3.5h1"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3627.93, "3628"), (12345, "12.35k"), (9999.6, "10000"), (2e12, "2T"), (3e-4, "3e-4"), (-0.25, "-0.25")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_durations():
    texts = {4.5: "4.5 s", 59.99: "60 s", 75: "1 min 15 s", 3725: "1 h 2 min", 200_000: "2 d 7 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_ticks():
    assert linear_ticks(0.0, 10.6, 5) == [0.0, 5.0, 10.0]
    assert tick_labels(linear_ticks(11_000, 12_600, 5)) == ["11k", "11.5k", "12k", "12.5k"]
    assert log_ticks(0.5, 300.0, 10, 6) == [1.0, 10.0, 100.0]
    assert log_ticks(3.0, 30.0, 10, 6) == [5.0, 10.0, 20.0]


def test_an_output_that_cannot_be_written_is_the_users_mistake(worked_run, tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        write_report([worked_run], tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_report([worked_run], worked_run / "run.json" / "report.html")
