"""Progress: plain lines in a file, a table in a terminal."""

import io

import pytest

from megarl.monitor.progress import Progress, duration, plain_line

VALUES = {"rollout/reward": 0.5123, "perf/tokens_per_s": 1234.4, "time/rollout": 1.25,
          "time/train": 3.0, "policy/entropy": 1.0}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_holds_what_there_is_and_the_longest_phase_first() -> None:
    assert plain_line(3, 60, VALUES, 112.4) == (
        "step 3/60  reward 0.512  entropy 1.000  tokens/s 1,234 "
        "| train 3.0s rollout 1.2s | 0:01:52 left"
    )
    assert plain_line(60, 60, {}, 0.0) == "step 60/60"


def test_a_file_gets_one_line_a_step_without_control_codes() -> None:
    now = [100.0]
    stream = io.StringIO()
    progress = Progress(10, steps_done=4, stream=stream, clock=lambda: now[0])
    progress.note("starting")
    now[0] += 20
    progress.update(6, VALUES)  # 2 steps in 20 s, 4 to go
    progress.update(7, VALUES)  # too soon for another line
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting" and lines[1].endswith("| 0:00:40 left") and len(lines) == 2
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_table_with_the_metrics_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(60, stream=stream)
    progress.update(1, VALUES)
    progress.note("[bold]saved[/bold]")  # not markup
    progress.update(2, {**VALUES, "rollout/reward": 0.75})
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "step 2 of 60" in text and "0.750" in text and "0.512" in text
    assert "entropy" in text and "accuracy" not in text
    assert "[bold]saved[/bold]" in text


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00:00"), (61.4, "0:01:01"), (3599.6, "1:00:00"), (273906, "3 d 04:05:06")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
