"""Files are read or refused by line; a stream gives each item once an epoch and can be resumed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.data.prompts import (
    DemonstrationStream,
    PromptStream,
    load_demonstrations,
    load_prompts,
)
from megarl.data.tokenizer import Tokenizer
from megarl.errors import DataError
from megarl.types import Prompt

Jsonl = Callable[..., Path]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (i,), {}) for i in range(count)]


def row(**values: Any) -> str:
    return json.dumps(values)


def test_a_prompt_file_is_read(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    first = row(id="a", prompt="3 + 5 =", answer="8", entry={"metadata": {"n": 2}})
    path = jsonl(first, "", row(prompt="1 - 2 =", answer="-1"))
    assert load_prompts(path, tokenizer, 10) == [
        Prompt("a", (7, 14, 9, 18), {"id": "a", "answer": "8", "entry": {"metadata": {"n": 2}}}),
        Prompt("3", (5, 15, 6, 18), {"answer": "-1"}),  # no id: the line number
    ]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([row(prompt="1 ="), '{"prompt": '], ":2: not JSON"),
        ([row(prompt="1 ="), "[1]"], ":2: found list; accepted: a JSON object"),
        ([row(prompt="1 ="), row(answer="1")], ":2: 'prompt' is None; accepted: some text"),
        ([row(prompt="")], ":1: 'prompt' is ''"),
        ([row(prompt=3)], ":1: 'prompt' is 3"),
        ([row(prompt="  ")], "has no tokens"),
        ([row(prompt="1 = x")], ":1: prompt: the tokenizer has no token"),
        ([row(id="a", prompt="1"), row(id="b", prompt="2"), row(id="a", prompt="3")], ":3: id 'a'"),
        ([row(id=1, prompt="1"), row(id="1", prompt="2")], ":2: id '1' is also on line 1"),
        (["", "  "], "is empty"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(
    jsonl: Jsonl, tokenizer: Tokenizer, lines: list[str], says: str
) -> None:
    path = jsonl(*lines)
    with pytest.raises(DataError) as error:
        load_prompts(path, tokenizer, 10)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name in ("absent", "latin"):
        with pytest.raises(DataError, match=name):
            load_prompts(tmp_path / name, tokenizer, 10)


def test_prompts_that_are_too_long_are_refused_by_id(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = jsonl(row(id="ok", prompt="1234"), *(row(id=f"l{i}", prompt="12345") for i in range(7)))
    with pytest.raises(DataError) as error:
        load_prompts(path, tokenizer, 4)
    assert "7 prompts are longer than 4 tokens: l0 (5 tokens), l1" in str(error.value)
    assert "l5" not in str(error.value)


def test_a_demonstration_trains_on_its_response_and_the_end(
    jsonl: Jsonl, tokenizer: Tokenizer
) -> None:
    path = jsonl(row(prompt="3 + 5 = <think>", response="</think>8"), row(prompt="1", response="2"))
    first, second = load_demonstrations(path, tokenizer, 8)
    assert first.tokens.tolist() == [7, 14, 9, 18, 2, 3, 12, 1]
    assert first.mask.tolist() == [False] * 5 + [True] * 3
    assert first.rollout_logprobs.tolist() == [0.0] * 8
    assert (str(first.tokens.dtype), str(first.mask.dtype)) == ("int32", "bool")
    assert (first.group, first.index, first.truncated) == (0, 0, False)
    assert second.tokens.tolist() == [5, 6, 1]
    assert second.group == 1
    with pytest.raises(DataError, match="1 demonstrations are longer than 7 tokens: 1"):
        load_demonstrations(path, tokenizer, 7)


def test_a_demonstration_needs_a_response(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r":1: 'response' is None"):
        load_demonstrations(jsonl(row(prompt="1")), tokenizer, 8)


def test_asking_for_more_than_an_epoch_goes_on_into_the_next_ones() -> None:
    stream = PromptStream(prompts(3), seed=0)
    taken = stream.take(8)
    assert len(taken) == 8
    assert (stream.epoch, stream.offset) == (2, 2)
    for epoch in (taken[:3], taken[3:6]):
        assert {p.id for p in epoch} == {"p0", "p1", "p2"}


def test_every_item_comes_once_an_epoch_whatever_the_portions() -> None:
    """G5: as a multiset, what was given is what was asked for."""
    whole = PromptStream(prompts(10), seed=3).take(30)
    stream = PromptStream(prompts(10), seed=3)
    portions = [p for size in (1, 4, 0, 7, 18) for p in stream.take(size)]
    assert portions == whole
    assert set(Counter(p.id for p in whole).values()) == {3}


def test_the_order_depends_on_seed_and_epoch() -> None:
    a, b = PromptStream(prompts(50), seed=1).take(100), PromptStream(prompts(50), seed=2).take(100)
    assert a != b
    assert a[:50] != a[50:]
    assert a == PromptStream(prompts(50), seed=1).take(100)


def test_the_order_is_the_same_for_ever() -> None:
    """Written down: an upgrade that reorders the data of a run half done must fail here."""
    taken = PromptStream(prompts(6), seed=0).take(12)
    assert " ".join(p.id for p in taken) == "p1 p2 p0 p4 p5 p3 p3 p0 p4 p1 p5 p2"


@pytest.mark.parametrize("before", [0, 1, 5, 10, 13])
def test_a_stream_goes_on_where_it_was(before: int) -> None:
    stream = PromptStream(prompts(5), seed=4)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    expected = stream.take(12)
    resumed = PromptStream(prompts(5), seed=4)
    resumed.load_state(state)
    assert resumed.take(12) == expected
    assert resumed.state() == stream.state()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (PromptStream(prompts(5), seed=1), "seed: saved 0, now 1"),
        (PromptStream(prompts(6), seed=0), "items: saved 5, now 6"),
        (PromptStream([*prompts(4), Prompt("x", (1,), {})], seed=0), "digest: saved"),
    ],
)
def test_a_position_in_other_data_is_refused(other: PromptStream, says: str) -> None:
    with pytest.raises(DataError, match=says):
        other.load_state(PromptStream(prompts(5), seed=0).state())


@pytest.mark.parametrize("damage", [{"offset": 5}, {"offset": -1}, {"epoch": -1}])
def test_a_damaged_position_is_refused(damage: dict[str, int]) -> None:
    stream = PromptStream(prompts(5), seed=0)
    with pytest.raises(DataError, match="damaged"):
        stream.load_state({**stream.state(), **damage})


def test_demonstrations_are_streamed_alike(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = jsonl(*(row(id=f"d{i}", prompt="1", response=str(i)) for i in range(4)))
    stream = DemonstrationStream(load_demonstrations(path, tokenizer, 8), seed=0)
    assert {s.prompt_id for s in stream.take(4)} == {"d0", "d1", "d2", "d3"}
