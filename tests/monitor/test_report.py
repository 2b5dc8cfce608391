"""report.html: well-formed, self-contained, and inert whatever the model wrote."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.monitor.plots import CHARTS, MAX_POINTS, charts, series
from megarl.monitor.report import write_report
from megarl.monitor.samples import SampleText, write_samples
from megarl.monitor.sinks import JsonlSink
from megarl.rundir import RunDir

ATTACK = "</pre><script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\"'& \x1b[2J"
VOID = {"meta", "img", "br"}
POINTS_OUTSIDE = re.compile(r"(https?:)?//|url\((?!#)|@import", re.IGNORECASE)


class Page(HTMLParser):
    """Every tag closed, and everything that a browser would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def images(self) -> list[str]:
        uris = [v for k, v in self.attributes if k == "src"]
        prefix = "data:image/svg+xml;base64,"
        assert all(u.startswith(prefix) for u in uris)
        return [base64.b64decode(u.removeprefix(prefix)).decode() for u in uris]


def build(run: RunDir) -> Page:
    path = write_report(run)
    assert path == run.report
    return Page(path.read_text("utf-8"))


def assert_self_contained(page: Page) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert name in ("src", "alt", "class", "charset", "content", "lang", "name"), name
        if name != "src":
            assert not POINTS_OUTSIDE.search(value)
    for svg in page.images:
        namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert not POINTS_OUTSIDE.search(namespaces) and "<script" not in svg
        assert not re.search(r'href="(?!#)', namespaces)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("x") / "<b>run</b>")
    sink = JsonlSink(run.metrics, resume_step=None)
    for step in range(1, 8):
        values = {"rollout/reward": step / 10, "policy/loss": math.nan if step == 3 else -step}
        values |= {"time/rollout": 1.0, "time/train": 2.0, "policy/seq_ratio_mean": 1.0}
        values |= {"policy/seq_ratio_min": 0.9, "policy/seq_ratio_max": 1.1}
        if step % 3 == 0:
            values |= {"eval/accuracy": 0.5, "time/eval": 1.0}
        sink.write(step, values)
    sink.close()
    run.resolved_config.write_text(
        json.dumps({"run": {"dir": ATTACK, "steps": 7}, "x": {"y": [1]}})
    )
    for step in (1, 7):
        sample = SampleText(step, ATTACK, f"response {step} {ATTACK}", ATTACK, 1.0, True, False, 1)
        write_samples(run.samples, step, [sample])
    write_report(run)
    return run


def test_a_report_has_charts_numbers_settings_and_samples(run: RunDir) -> None:
    page = Page(run.report.read_text("utf-8"))
    alts = [v for k, v in page.attributes if k == "alt"]
    for title in (
        "Reward",
        "Accuracy",
        "Loss",
        "Time of a step",
        "Ratio of new to old, a sequence",
    ):
        assert f"{title} over steps" in alts
    assert "Entropy over steps" not in alts  # never measured
    assert len(page.images) == len(alts)
    assert "7 steps recorded" in page.text
    assert "run.steps" in page.text and "x.y" in page.text
    assert "Samples of step 1" in page.text and "Samples of step 7" in page.text
    row = re.search(r"policy/loss\s+(\S+)\s*(\S+)\s*(\S+)\s*(\S+)", _spaced(run))
    assert row is not None and row.groups() == ("-1", "-7", "-7", "-1")


def test_a_report_loads_and_runs_nothing_and_escapes_what_the_model_wrote(run: RunDir) -> None:
    page = Page(run.report.read_text("utf-8"))
    assert_self_contained(page)
    shown = ATTACK.replace("\x1b", "\\x1b")
    assert f"response 7 {shown}" in page.text  # whole, as text
    assert ATTACK in page.text  # the setting
    raw = run.report.read_text()
    assert "<script" not in raw and "onerror=alert(2)&gt;" in raw


def test_an_empty_run_directory_has_a_report(tmp_path: Path) -> None:
    page = build(RunDir(tmp_path))
    assert_self_contained(page)
    assert "No step has been recorded yet." in page.text and page.images == []


def test_one_step_with_one_metric_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    sink = JsonlSink(run.metrics, resume_step=None)
    sink.write(0, {"eval/accuracy": 0.5})
    sink.close()
    page = build(run)
    assert [v for k, v in page.attributes if k == "alt"] == ["Accuracy over steps"]


def test_a_metric_that_is_never_finite_is_not_drawn() -> None:
    assert charts([{"step": 1, "time": 0.0, "policy/loss": math.nan}]) == []


def test_the_same_run_gives_the_same_bytes(run: RunDir) -> None:
    before = run.report.read_bytes()
    assert write_report(run).read_bytes() == before


def test_long_series_are_averaged_in_blocks() -> None:
    rows = [{"step": s, "x": float(s % 2)} for s in range(2 * MAX_POINTS)]
    steps, values = series(rows, "x")
    assert len(steps) == MAX_POINTS and set(values) == {0.5} and steps[:2] == [0.5, 2.5]


def test_every_chart_can_be_drawn() -> None:
    names = {n for c in CHARTS for n in (*c.lines, *(c.band or ()))} | {"time/rollout", "time/step"}
    rows = [{"step": s, **dict.fromkeys(names, 0.5 + s)} for s in range(3)]
    assert [title for title, _ in charts(rows)] == [*(c.title for c in CHARTS), "Time of a step"]


def _spaced(run: RunDir) -> str:
    return re.sub(r"<[^>]*>", " ", run.report.read_text())
