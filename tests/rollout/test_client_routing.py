"""Routed experts in a reply: of the layers with experts, or of all layers; nothing else."""

import asyncio
import base64
import json
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megarl.rollout.client import Answer, Ask
from megarl.rollout.replies import read_answer
from megarl.types import RoutingShape
from tests.rollout.test_client import answering, change_meta, good_reply

D, E = False, True
ROWS = 4  # 2 + 3 tokens of which the last was never routed
MIXED = RoutingShape((D, E, E, D, E, E), topk=2, experts=500)
FIRST_DENSE = RoutingShape((D, D, E), topk=3, experts=8)
ALL = RoutingShape((E, E), topk=2, experts=256)


def ask(ids: NDArray[Any] | None, shape: RoutingShape, raw: str | None = None) -> Any:
    """The routing that a client takes from a server which reports ``ids``, or what is wrong."""
    if ids is not None:
        raw = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    odd = answering(change_meta(routed_experts=raw))
    outcome = asyncio.run(odd.ask(n=1, routing=shape))
    assert odd.bodies[0]["return_routed_experts"] is True
    assert isinstance(outcome, Answer)
    (completion,) = outcome.parts
    return outcome.wrong if completion is None else completion.routing


def choices(shape: RoutingShape, rows: int = ROWS) -> NDArray[Any]:
    """[rows, MoE layers, K]: 10 * layer + row and its neighbours, modulo the experts."""
    at = np.arange(rows)[:, None, None] + 10 * np.arange(shape.num_moe_layers)[:, None]
    return (at + np.arange(shape.topk)) % shape.experts


@pytest.mark.parametrize("shape", [MIXED, FIRST_DENSE, ALL], ids=str)
@pytest.mark.parametrize("in_dense", [0, -1, 7])
def test_dense_layers_are_left_out_whatever_is_reported_of_them(
    shape: RoutingShape, in_dense: int
) -> None:
    expected = choices(shape)
    every = np.full((ROWS, len(shape.moe_layers), shape.topk), in_dense)
    every[:, list(shape.moe_layers)] = expected
    for ids in (expected, every):
        found = ask(ids, shape)
        assert found.dtype == (np.uint16 if shape.experts > 256 else np.uint8)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("layers", [1, 3, 5, 7, 12])
def test_other_numbers_of_layers_are_refused_with_both(layers: int) -> None:
    ids = np.zeros((ROWS, layers, 2))
    assert re.search(rf"those of {layers} layers; .*\(4, 4, 2\), .* all 6", ask(ids, MIXED))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_other_numbers_of_tokens_are_refused(rows: int) -> None:
    assert re.search(
        rf"found {rows * 4} routed experts, .*\(4, 2, 2\)", ask(choices(ALL, rows), ALL)
    )


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        ((2, 1, 0), 256, "token 2, layer 1, choice 0: expert 256 of 256"),
        ((0, 0, 1), -1, "token 0, layer 0, choice 1: expert -1 of 256"),
        ((3, 1, 1), 13, "token 3, layer 1, choice 1: expert 13 a second time"),
    ],
)
def test_what_no_router_chooses_is_refused(at: tuple[int, ...], value: int, words: str) -> None:
    ids = choices(ALL)
    ids[at] = value
    assert re.search(words, ask(ids, ALL))


@pytest.mark.parametrize("raw", [None, "", "AAAAAA=="])
@pytest.mark.parametrize("count", [0, 2])
def test_an_aborted_response_need_not_have_been_routed(raw: str | None, count: int) -> None:
    """It waited, or was in the middle: it is asked for again (``collect.py``), and no error."""

    def aborted(reply: dict[str, Any]) -> dict[str, Any]:
        meta = reply["meta_info"]
        meta |= {"finish_reason": {"type": "abort"}, "weight_versions": None}
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:count]
        return {
            "output_ids": reply["output_ids"][:count],
            "meta_info": meta | {"routed_experts": raw},
        }

    outcome = asyncio.run(answering(aborted).ask(n=1, routing=MIXED))
    assert isinstance(outcome, Answer)
    (completion,) = outcome.parts
    assert completion is not None
    assert completion.finish == "abort" and completion.routing is None


def test_a_server_that_does_not_report_is_an_error() -> None:
    assert re.search("found no routed_experts", ask(None, ALL))
    assert re.search("do not decode", ask(None, ALL, raw="no base64!"))


# --- tables are cut out before the rest is parsed -------------------------------------------------


def raw_of(replies: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(replies, separators=separators).encode()


def asked(count: int) -> list[Ask]:
    return [Ask(f"r{i}", [2, 3], 3, i) for i in range(count)]


def replies_with(tables: list[Any]) -> list[dict[str, Any]]:
    replies = [good_reply(f"r{i}") for i in range(len(tables))]
    for reply, table in zip(replies, tables, strict=True):
        reply["meta_info"]["routed_experts"] = table
    return replies


def encoded(ids: NDArray[Any]) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", "\t:\n ")])
def test_every_sequence_gets_its_own_table(separators: tuple[str, str]) -> None:
    expected = [(choices(ALL) + i) % 256 for i in range(12)]
    replies = replies_with([encoded(ids) for ids in expected])
    replies[3]["text"] = 'says "routed_experts": "AAAA" and \\ and \\"'
    replies[4]["meta_info"]["routed_experts_start_len"] = 0
    answer = read_answer(raw_of(replies, separators), asked(12), ALL)
    assert not answer.wrong
    for part, ids in zip(answer.parts, expected, strict=True):
        assert part is not None and part.routing is not None
        assert part.routing.tolist() == ids.tolist()


def test_escapes_in_a_table_are_the_parsers_business() -> None:
    table = encoded(choices(ALL))
    raw = raw_of(replies_with(["*", "*"])).replace(b'"*"', f'"{table}"'.encode(), 1)
    escaped = "".join(f"\\u{ord(c):04x}" for c in table)
    for spelled in (table.replace("/", "\\/").replace("A", "\\u0041"), escaped):
        answer = read_answer(raw.replace(b'"*"', f'"{spelled}"'.encode()), asked(2), ALL)
        assert not answer.wrong
        first, second = answer.parts
        assert first is not None and second is not None
        assert first.routing is not None and second.routing is not None
        assert first.routing.tolist() == second.routing.tolist() == choices(ALL).tolist()


@pytest.mark.parametrize(
    "other", [0, 1, "0", "table 0", "", [], {}, None, True, "r0", {"routed_experts": "AAAA"}]
)
def test_nobody_gets_the_table_of_another(other: Any) -> None:
    answer = read_answer(raw_of(replies_with([encoded(choices(ALL)), other])), asked(2), ALL)
    first, second = answer.parts
    assert first is not None and first.routing is not None and second is None
    assert answer.wrong.startswith("request r1: found ")


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 60, 200])
def test_half_an_answer_is_no_answer(cut: int) -> None:
    raw = raw_of(replies_with([encoded(choices(ALL))] * 2))
    answer = read_answer(raw[:-cut], asked(2), ALL)
    assert answer.parts == (None, None) and "expected: JSON" in answer.wrong
