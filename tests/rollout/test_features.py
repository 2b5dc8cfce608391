"""Which servers are taken, and what a push asks of them, by version."""

import pytest

from megarl import __version__
from megarl.errors import ServerError
from megarl.rollout.control import OPERATIONS, ServerControl, calls_of
from megarl.rollout.features import EMBEDDED, Features, features_of, version_of
from tests.rollout.conftest import Server

SESSION = {"/begin_weight_update", "/end_weight_update"}


@pytest.mark.parametrize(
    "version, session",
    [
        ("sglang 0.5.20", False),  # has no such endpoints
        ("sglang 0.5.21", True),
        ("sglang 0.5.22.post1", True),
        ("sglang 0.5.23", True),
        ("sglang 0.5.23+cpu", True),
        (f"{EMBEDDED} {__version__}", True),
    ],
)
def test_a_session_is_opened_where_the_version_knows_one(version: str, session: bool) -> None:
    features = features_of(version)
    for op, path in (("begin", "/begin_weight_update"), ("commit", "/end_weight_update")):
        paths = [call.path for call in calls_of(op, features)]
        assert (path in paths) is session
        rest = [call.path for call in OPERATIONS[op] if call.path not in SESSION]
        assert [p for p in paths if p not in SESSION] == rest


@pytest.mark.parametrize(
    "version",
    ["sglang 0.5.19", "sglang 0.5.24", "sglang 0.6", "sglang 1.0.0", "sglang dev", "vllm 0.5.23",
     "", f"{EMBEDDED} 99.0.0", "sglang (no version)"],
)  # fmt: skip
def test_others_are_refused_with_those_that_are_known(version: str) -> None:
    with pytest.raises(ServerError) as caught:
        features_of(version)
    for words in ("sglang 0.5.21 to 0.5.23", EMBEDDED, "rollout.server_command"):
        assert words in str(caught.value)


def test_control_of_a_server_with_another_version_is_refused() -> None:
    with pytest.raises(ServerError, match=r"sglang 0\.4\.0"):
        ServerControl("http://a:1", "key", version="sglang 0.4.0")


def test_the_embedded_server_says_who_it_is(server: Server) -> None:
    told = server.get("/server_info")
    assert version_of(told) == f"{EMBEDDED} {__version__}"
    assert features_of(version_of(told)) == Features()
    assert told["boot"] == server.get("/server_info")["boot"]
