"""Requests through an sglang-router, which takes one sequence at a time (`router.py` has the rest).

A request that nobody waits for is not aborted by its id, which the router does not pass on: the
connection is closed, the router closes its own, and the server stops.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rollout.client import Failure, Refusal, RolloutClient
from megarl.rollout.replies import Answer, Ask
from megarl.types import Member, RoutingShape, Sampling

ROUTER = "sglang-router"  # as `Member.version` begins


class RoutedClient(RolloutClient):
    """A group's sequences in requests of their own, at once."""

    can_abort = False

    async def generate(
        self,
        asks: Sequence[Ask],
        sampling: Sampling,
        routing: RoutingShape | None = None,
        least_version: int = 0,
    ) -> Answer | Failure | Refusal:
        """Of several that failed the first is told; what others gave is kept."""
        assert routing is None, "a router drops routed experts; config/rollout_rules.py"
        one = super().generate
        outcomes = await asyncio.gather(
            *(one([ask], sampling, None, least_version) for ask in asks)
        )
        bad = [o for o in outcomes if not isinstance(o, Answer)]
        if len(bad) == len(outcomes) or any(isinstance(o, Refusal) for o in bad):
            return next((o for o in bad if isinstance(o, Refusal)), bad[0])
        parts = tuple(o.parts[0] if isinstance(o, Answer) else None for o in outcomes)
        wrong = [o.wrong if isinstance(o, Answer) else o.reason for o in outcomes]
        return Answer(parts, next((words for words in wrong if words), ""))

    async def abort(self, rids: Sequence[str]) -> bool:
        return False

    def _batch(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        (tokens,), (sampling,), (rid,) = body["input_ids"], body["sampling_params"], body["rid"]
        return {**body, "input_ids": tokens, "sampling_params": sampling, "rid": rid}

    def _replies(self, raw: bytes) -> bytes:
        return b"[" + raw + b"]"


def connect(member: Member, key: str, timeout_s: float) -> RolloutClient:
    """The client of a server, or of a router before several."""
    kind = RoutedClient if member.version.startswith(ROUTER) else RolloutClient
    return kind(member.url, key, timeout_s)
