"""metrics.jsonl and TensorBoard: append, resume, and a disk that is full."""

import json
import logging
import math
from pathlib import Path

import pytest

from megarl.errors import RunError
from megarl.monitor.sinks import JsonlSink, TensorBoardSink, open_sinks, read_metrics
from megarl.rundir import RunDir


def fill(path: Path, steps: range, value: float, resume_step: int | None = None) -> None:
    sink = JsonlSink(path, resume_step=resume_step)
    for step in steps:
        sink.write(step, {"x": value})
    sink.close()


def test_a_line_a_step_with_its_values_and_the_time(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=None)
    sink.write(1, {"policy/loss": 0.5, "rollout/reward": 1.0})
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]  # before closing
    assert row.pop("time") > 1.7e9
    assert row == {"step": 1, "policy/loss": 0.5, "rollout/reward": 1.0}
    sink.close()


def test_values_without_json_form_are_strict_json_and_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=None)
    sink.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    sink.close()

    def refuse(text: str) -> float:
        raise AssertionError(text)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert (row["a"], row["b"], row["nonfinite"]) == (None, None, {"a": "nan", "b": "-inf"})
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == -math.inf and row["c"] == 1.0


def test_a_fresh_run_does_not_write_into_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 3), 1.0)
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"metrics\.jsonl.*run\.resume.*run\.dir"):
        JsonlSink(path, resume_step=None)
    assert path.read_bytes() == before


def test_resuming_moves_later_lines_aside_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 7), 1.0)
    with caplog.at_level(logging.WARNING):
        fill(path, range(5, 9), 2.0, resume_step=4)
    assert [(r["step"], r["x"]) for r in read_metrics(path)] == [
        *((s, 1.0) for s in range(1, 5)),
        *((s, 2.0) for s in range(5, 9)),
    ]
    aside = tmp_path / "metrics.superseded.jsonl"
    assert [r["step"] for r in read_metrics(aside)] == [5, 6]
    assert "2 lines past step 4 moved to metrics.superseded.jsonl" in caplog.text
    fill(path, range(4, 5), 3.0, resume_step=3)  # once more: nothing that was aside is lost
    assert [(r["step"], r["x"]) for r in read_metrics(aside)][2:] == [(4, 1.0)] + [
        (s, 2.0) for s in range(5, 9)
    ]


def test_resuming_at_the_end_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 5), 1.0)
    before = path.read_bytes()
    JsonlSink(path, resume_step=4).close()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_line_torn_by_a_crash_is_moved_aside_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4), 1.0)
    path.write_text(path.read_text()[:-9])
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    fill(path, range(3, 4), 2.0, resume_step=2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert '{"step": 3' in (tmp_path / "metrics.superseded.jsonl").read_text()


def test_a_step_is_written_once_and_in_order(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=None)
    sink.write(3, {})
    for step in (3, 2):
        with pytest.raises(AssertionError, match=rf"\({step}, 3\)"):
            sink.write(step, {})
    sink.close()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonlSink(path, resume_step=None)
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left.*MB free"):
        sink.write(1, {"x": 1.0})


def test_a_folder_that_cannot_be_made_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match=r"cannot write .*run/metrics\.jsonl"):
        JsonlSink(tmp_path / "run" / "metrics.jsonl", resume_step=None)


def test_no_metrics_read_as_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_is_optional_and_holds_the_same_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert [type(s) for s in open_sinks(run, tensorboard=False, resume_step=0)] == [JsonlSink]
    sinks = open_sinks(run, tensorboard=True, resume_step=None)
    assert [type(s) for s in sinks] == [JsonlSink, TensorBoardSink]
    for sink in sinks:
        sink.write(1, {"rollout/reward": 0.25})
        sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 0.25)]
