"""Samples bring the experts that the server sent their tokens to; a server that cannot say is found
before it is needed.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.rollout.collect import RolloutCollector
from megarl.types import RoutingShape
from tests.rollout.conftest import EXPERTS, LAYERS, TOP_K, Reference, Server
from tests.rollout.test_collect import NEW, PROMPTS, SETTINGS, serving, spell

SHAPE = RoutingShape((True,) * LAYERS, TOP_K, EXPERTS)


def collector(url: str, key: str, shape: RoutingShape = SHAPE) -> RolloutCollector:
    settings = replace(SETTINGS, routing=shape)
    return RolloutCollector([url], key, settings, decode=spell, reward=lambda *_: 1.0)


def test_samples_bring_the_routing_of_all_but_their_last_token(
    server: Server, reference_a: Reference
) -> None:
    made = collector(server.url, server.key)
    made.probe_routing(PROMPTS[0].token_ids)
    for s in made.collect(PROMPTS[:3], 1, NEW).samples:
        assert s.routing is not None and s.routing.dtype == np.uint8
        expected = np.sort(reference_a.routing(s.tokens.tolist())[:-1].numpy(), -1)
        np.testing.assert_array_equal(np.sort(s.routing, -1), expected)
    made.close()


def reporting(meta: dict[str, Any]) -> Callable[[web.Request], Any]:
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["return_routed_experts"] is True
        assert body["sampling_params"][0]["max_new_tokens"] == 1
        common = {"id": body["rid"][0], "finish_reason": {"type": "length"}, "weight_version": "0"}
        common["output_token_logprobs"] = [[-1.0, 7, None]]
        return web.json_response([{"output_ids": [7], "meta_info": common | meta}])

    return generate


async def refusing(request: web.Request) -> web.Response:
    return web.json_response({"error": "return_routed_experts: not enabled"}, status=400)


def experts(*shape: int) -> dict[str, str]:
    ids = np.broadcast_to(np.arange(shape[-1]), shape).astype("<i4")
    return {"routed_experts": base64.b64encode(ids.tobytes()).decode()}


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (reporting({}), "found no routed_experts"),
        (reporting({"routed_experts": None}), "found no routed_experts"),
        (reporting(experts(3, LAYERS + 2, TOP_K)), f"those of {LAYERS + 2} layers"),
        (reporting(experts(3, 1, TOP_K)), "those of 1 layers"),
        (refusing, "HTTP 400.*not enabled"),
    ],
)
def test_a_server_that_does_not_report_is_found_at_the_start(handler: Any, words: str) -> None:
    with serving(handler) as url:
        made = collector(url, "key")
        with pytest.raises(ServerError, match=words) as refusal:
            made.probe_routing([3, 4, 5])
        made.close()
    assert str(refusal.value).startswith("moe.routing_replay=rollout: ")
    assert url in str(refusal.value) and "--enable-return-routed-experts" in str(refusal.value)
