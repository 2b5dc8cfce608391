"""A server that a trainer has left paused, as its keeper sees it: the embedded one and the real
SGLang."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.rollout import watching
from megarl.rollout.keeper import NamedKeeper
from megarl.rollout.watching import Care
from tests.rollout.fleets import until
from tests.sglang.contract import PROMPT, generate
from tests.sglang.protocol import ok
from tests.sglang.server import Endpoint


def test_it_goes_on_after_the_push_and_stays_the_member_that_it_was(
    server: Endpoint,
    shared_name: str,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It lacks nothing but the word. Within a push nobody gives it."""
    monkeypatch.setattr(watching, "GENEROUS", 1)
    caplog.set_level(logging.INFO)
    care = Care(
        server.key,
        probe_every_s=0.2,
        # SGLang looks for a sign of life once a second.
        probe_timeout_s=3.0 if shared_name == "sglang" else 1.0,
        restart=True,
        max_restarts=0,
        longest=64,
        report=lambda death: None,
        say=lambda text: None,
    )
    keeper = NamedKeeper("it", server.url, care)
    keeper.start()
    try:
        assert keeper.settled.wait(60)
        member = keeper.member
        assert member is not None, keeper.failure
        with care.hold():
            ok(server, "/pause_generation", mode="retract")
            waiting = background.submit(generate, server, PROMPT, 3)
            keeper.suspect(member, "no answer")
            time.sleep(1.0)
            assert not waiting.done()
        reply = waiting.result(30)
        assert len(reply["output_ids"]) == 3
        until(lambda: "it answers again" in caplog.text)
        assert keeper.member == member and not care.events
    finally:
        keeper.close()
