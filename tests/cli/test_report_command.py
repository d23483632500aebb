"""The command report.py, and its page in a real browser."""

import json
import math
import shutil
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

import pytest

from recipes.config.errors import UserError, run_command
from recipes.report import main

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH to view the page")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """120 steps with an overflow at step 30, a crash after step 70, a resume from step 60 and a spike at step 90."""
    folder = tmp_path_factory.mktemp("runs") / "fp16"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"arguments": {"model": "tiny", "max_steps": 120}}))
    (folder / "ds_config.json").write_text(json.dumps({"fp16": {"enabled": True}}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in [*range(1, 71), 0, *range(61, 121)]:
            if step == 0:
                file.write(json.dumps({"event": "resume", "step": 60}) + "\n")
                continue
            loss = 2 + 6 * math.exp(-step / 20) + 3 * (step == 90)
            line = {
                "step": step, "tokens": 2048 * step, "loss": loss, "mtp_loss": loss + 0.5, "balance_loss": 1e-4,
                "learning_rate": 3e-4, "grad_norm": 1.0, "loss_scale": 65536.0 if step < 30 else 32768.0,
                "skipped_steps": int(step >= 30), "step_seconds": 0.5, "tokens_per_second": 4096.0, "mfu": 0.3,
                "memory_bytes": 2**30, "host_rss_bytes": 2**29, "expert_load_violation": 1 / step, "epoch": 0,
                "router_entropy": 0.99, "dead_experts": 100 // step, "data_wait_seconds": 0.001,
                "communication_seconds": 0.1, "slowest_rank": 1, "slowest_rank_ratio": 1.1,
                "dead_experts_by_layer": {f"model.layers.{layer}.mlp.gate": 50 // step for layer in (1, 2)},
                "expert_load": {f"model.layers.{layer}.mlp.gate": [0.4, 0.3, 0.2, 0.1] for layer in (1, 2)},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"event": "spike", "step": 90, "loss": 5.0}) + "\n")
        growth = {"memory": "host memory", "rank": 1, "bytes_per_1000_steps": 2**29}
        file.write(json.dumps({"event": "memory_growth", "step": 110, **growth}) + "\n")
    return folder


def test_it_runs_as_a_script_from_another_folder_and_prints_json(run_folder, tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "report.py"), str(run_folder), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["report"] == str(run_folder / "report.html")
    assert result["runs"][0]["steps"] == 120
    assert result["runs"][0]["skipped_steps"] == result["runs"][0]["spikes"] == result["runs"][0]["resumes"] == 1
    assert (run_folder / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_several_runs_go_into_the_current_folder(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(run_folder), str(run_folder)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("report: report.html (")


def test_output_names_the_file_and_its_folder_is_made(run_folder, tmp_path):
    assert main([str(run_folder), "--output", str(tmp_path / "new" / "a.html")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.html"]


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert run_command(lambda: main([str(tmp_path / "none")])) == 2
    assert run_command(lambda: main([str(tmp_path)])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(": ")[0] for line in captured.err.splitlines()] == ["error", "error"]
    with pytest.raises(UserError, match="holds no line"):
        main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


def browser(page, profile, *flags):
    usual = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")
    return subprocess.run([CHROMIUM, *usual, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)


# Puts the page into frames as wide as a desk and a phone, and writes down what a reader would meet.
PROBE = """<body>FRAMES<script>
onload = () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow;
    const plot = page.querySelector("#chart-loss .plot"), box = plot.getBoundingClientRect();
    const x = box.left + box.width * (0.01 + 0.98 * 89.3 / 119);  // nearest to step 90
    plot.dispatchEvent(new view.PointerEvent("pointermove", { clientX: x, clientY: box.top + 9 }));
    const tip = page.getElementById("tip").innerText.split(/\\s*\\n\\s*/).join(" ");
    plot.dispatchEvent(new view.PointerEvent("pointerleave", {}));
    const labels = [...page.querySelectorAll(".x span, .y span")].map((e) => e.getBoundingClientRect());
    const texts = [...page.querySelectorAll("p, span, li, td, th, h3, .xlabel")].filter((e) => e.innerText.trim());
    found.push({
      wide: page.documentElement.scrollWidth, view: view.innerWidth, tip, hidden: page.getElementById("tip").hidden,
      plots: [...page.querySelectorAll(".chart:not(details *) .plot")].map((e) => e.getBoundingClientRect().width),
      outside: labels.filter((b) => b.left < 0 || b.right > view.innerWidth).length,
      smallest: Math.min(...texts.map((e) => parseFloat(view.getComputedStyle(e).fontSize))),
    });
  }
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
};
</script></body>"""


@needs_browser
def test_in_a_browser_it_fits_a_desk_and_a_phone_and_hovering_shows_values(run_folder, tmp_path):
    main([str(run_folder), "--output", str(tmp_path / "report.html")])
    source = escape((tmp_path / "report.html").read_text(encoding="utf-8"))
    frame = '<iframe style="width:{}px;height:900px" srcdoc="{}"></iframe>'
    frames = "".join(frame.format(width, source) for width in (1280, 390))
    (tmp_path / "probe.html").write_text(PROBE.replace("FRAMES", frames), encoding="utf-8")
    done = browser(tmp_path / "probe.html", tmp_path / "profile", "--virtual-time-budget=5000", "--dump-dom")
    found = json.loads(unescape(done.stdout.split("<pre>")[1].split("</pre>")[0]))
    for view, width, plot_width in zip(found, (1280, 390), (400, 250), strict=True):
        assert view["view"] == width
        assert view["wide"] <= width  # nothing makes the page scroll sideways
        assert len(view["plots"]) == 16 and min(view["plots"]) > plot_width
        assert view["outside"] == 0
        assert view["smallest"] >= 12
        assert view["tip"].startswith("step 90 each logged step 5.0667")  # 2 + 6 exp(-4.5) + 3
        assert view["hidden"]


@needs_browser
def test_a_browser_draws_it_without_an_error(run_folder, tmp_path):
    main([str(run_folder), "--output", str(tmp_path / "report.html")])
    picture = tmp_path / "report.png"
    flags = ("--enable-logging=stderr", "--window-size=1280,2000", f"--screenshot={picture}")
    done = browser(tmp_path / "report.html", tmp_path / "profile", *flags)
    assert picture.stat().st_size > 50_000  # an empty page of this size has about 10 kB
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
