"""Samples on disk: text in, the same text out, and nothing a terminal would obey."""

from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.monitor.samples import (
    SampleText,
    describe,
    printable,
    read_samples,
    sample_steps,
    write_samples,
)

SAMPLE = SampleText(3, "2 + 2 = ", "</think>4", "4", 1.0, True, False, 2, "p1", 6)


@pytest.mark.parametrize("text", ["", 'ü 数 \u2028 \x85 \n\r\t"\\', "\ud800", "\x1b[2J\x00"])
def test_any_text_survives_the_file(tmp_path: Path, text: str) -> None:
    sample = SampleText(1, text, text, text, -0.5, False, True, 7)
    write_samples(tmp_path, 1, [sample, SAMPLE])
    assert read_samples(tmp_path, 1) == [sample, SAMPLE]


def test_steps_are_numbers_in_order_and_other_files_are_ignored(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write_samples(tmp_path, step, [])
    (tmp_path / "step_x.jsonl").write_text("")
    (tmp_path / "step_5.jsonl.17.part").write_text("")
    assert sample_steps(tmp_path) == [9, 10, 100]
    assert read_samples(tmp_path, 9) == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 1, [SAMPLE, SAMPLE])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DataError, match=r"step_1\.jsonl:2 is not a sample"):
        read_samples(tmp_path, 1)


def test_control_characters_are_spelled_out_and_letters_are_not() -> None:
    assert printable("a\x1b]0;title\x07\u202eb\n\tü数") == "a\\x1b]0;title\\x07\\u202eb\n\tü数"


def test_the_heading_says_how_the_sample_went() -> None:
    assert describe(SAMPLE) == "step 3 p1: reward 1, correct, 6 tokens, weights 2"
    cut = SampleText(3, "", "", "", 0.0, False, True, 2)
    assert describe(cut) == "step 3: reward 0, wrong, cut off, weights 2"
