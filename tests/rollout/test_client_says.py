"""What requests say of sampling, and what answers say of the weights that sampled."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from megarl.rollout.client import Answer, Failure
from megarl.types import Sampling
from tests.rollout.test_client import (
    Change,
    Odd,
    answered,
    answering,
    change_meta,
    good_reply,
)


def test_whatever_a_server_could_have_a_default_of_is_said_outright() -> None:
    """SGLang fills in what a request leaves out (--preferred-sampling-params); null leaves nothing
    to it. tests/sglang/test_sampler.py has SGLang's own list of what there is.
    """
    odd = answering(lambda reply: None)
    asyncio.run(odd.ask(sampling=Sampling(0.7, 3, top_p=0.9, top_k=5, min_p=0.1)))
    nothing = ("logit_bias", "stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf")
    nothing += ("structural_tag", "custom_params", "beam_width")
    expected = {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_new_tokens": 3},
        **{"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0},
        **{"min_new_tokens": 0, "n": 1, "ignore_eos": False, "no_stop_trim": False},
        **{"skip_special_tokens": False, "spaces_between_special_tokens": True},
        **dict.fromkeys(nothing),
    }
    for seed, params in enumerate(odd.bodies[0]["sampling_params"]):
        assert params == {**expected, "sampling_seed": seed}


def test_a_version_alone_stands_for_the_whole_response() -> None:
    odd = answering(lambda r: r["meta_info"].pop("weight_versions") and None)
    completion = answered(odd)[1]
    assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(3, 0, 3)]


def with_versions(*versions: object) -> Change:
    spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions[:-1])]
    last = {"version": versions[-1], "start": len(spans), "end": 3}
    return change_meta(weight_versions=[*spans, last])


def alone(version: object) -> Change:
    """As a server says it that tells of no spans."""
    return change_meta(weight_version=version, weight_versions=None)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (with_versions("6"), "'6'"),
        (with_versions("6", "8"), "'6'"),
        (with_versions("8", "8", "0"), "'0'"),
        (with_versions("default"), "'default'"),
        (with_versions(""), "''"),
        (with_versions("-7"), "'-7'"),
        (with_versions("7.0"), "'7.0'"),
        (with_versions(None), "None"),
        (with_versions(7), "7"),
        (alone("6"), "'6'"),
        (alone("default"), "'default'"),
        (alone(None), "None"),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_what_other_weights_sampled_is_no_answer(change: Change, found: str, broken: bool) -> None:
    """Not even its right sequences: another process has taken the server's place. Whatever else is
    wrong with it does not matter.
    """

    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        replies = [good_reply(rid) for rid in body["rid"]]
        with_versions("7")(replies[0])
        replies[1]["output_ids"] = replies[1]["output_ids"][: 2 if broken else 3]
        change(replies[1])
        return replies

    outcome = asyncio.run(Odd(generate).ask(least_version=7))
    expected = "expected: 7 or above, as a weight push sets it"
    assert outcome == Failure(f"found weight version {found}; {expected}", taken=False)


@pytest.mark.parametrize("versions", [("7",), ("8",), ("7", "8", "9"), ("12",)])
def test_newer_weights_are_right(versions: tuple[str, ...]) -> None:
    odd = answering(with_versions(*versions))
    outcome = asyncio.run(odd.ask(n=1, least_version=7))
    assert isinstance(outcome, Answer) and outcome.parts[0] is not None
    spans = outcome.parts[0].version_spans
    assert [str(span.version) for span in spans] == list(versions)
