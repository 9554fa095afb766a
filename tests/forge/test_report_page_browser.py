"""The report page in a real browser, as wide as a phone. Skips itself where there is no Chromium."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forge.metrics import METRIC_KEYS, make_row
from forge.report.page import page
from forge.report.runs import read_runs

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
WIDTH = 390
# A browser window is never as narrow as a phone, a frame is.
FRAME = """<body><iframe id="page" src="page.html" style="width:{width}px;height:800px;border:0"></iframe><script>
document.getElementById("page").onload = (event) => {{
  const page = event.target.contentDocument;
  const inside = (e) => e.closest(".wide") ? e.matches(".wide") : !e.closest("svg") || e.matches("svg");
  const cut = [...page.querySelectorAll("body *")].filter(inside)
    .filter((e) => e.getBoundingClientRect().right > {width} + 1).map((e) => e.tagName);
  document.title = JSON.stringify({{width: page.documentElement.scrollWidth, cut: cut,
    charts: page.querySelectorAll("svg polyline").length}});
}};
</script>"""


def write_run(folder: Path, pace: float) -> Path:
    folder.mkdir()
    rows = []
    for step in range(1, 41):
        values: dict[str, Any] = dict.fromkeys(METRIC_KEYS)
        values |= {"step": step, "policy_version": step, "time_s": step * pace, "episodes/trained": 8}
        values |= {"reward/mean": math.sin(step), "reward/std": 0.2, "loss/policy": 1e-5 * step, "grad_norm": 1e6}
        values |= {"time/wait_batch_s": 0.1, "time/step_s": 0.2, "tokens/generated": 10, "tokens/trained": 10}
        values |= {"tokens/wasted": 3, "staleness/mean": 1.0, "staleness/max": 1, "staleness/hist/1": 1.0}
        rows.append(json.dumps(make_row(values)))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "config.yaml").write_text(f"model: {'a-long-name-without-any-place-to-break' * 3}\npace: {pace}\n")
    pieces = [["word" * 100, -1], ["<script>throw 1</script>" * 20, 3], ["next", 4]]
    episode = {"step": 1, "prompt": "p", "completion": "c", "reward": 1.0, "versions": [3, 4], "pieces": pieces}
    (folder / "episodes.jsonl").write_text(json.dumps(episode) + "\n")
    return folder


@pytest.mark.soak
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scheme", ["0", "1"], ids=["dark", "light"])
def test_the_page_fits_a_phone_and_the_browser_has_nothing_to_complain_about(
    tmp_path: Path, count: int, scheme: str
) -> None:
    runs = [write_run(tmp_path / f"run-with-a-long-name-{n}", 1.0 + n) for n in range(count)]
    (tmp_path / "page.html").write_text(page(read_runs(runs)))
    (tmp_path / "frame.html").write_text(FRAME.format(width=WIDTH))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    options += ["--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    url = (tmp_path / "frame.html").as_uri()
    done = subprocess.run([CHROMIUM, *options, url], capture_output=True, text=True, timeout=300)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    found = json.loads(title[1])
    assert found["charts"] > 5
    assert found["width"] <= WIDTH
    assert found["cut"] == []
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
