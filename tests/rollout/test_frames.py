"""Messages between a collector's processes come over whole, whatever is in them."""

import json
import socket
import threading
from typing import Any

import numpy as np
import pytest

from megarl.rollout.frames import make_frame, receive_frame, send_frame
from megarl.rollout.messages import (
    CollectorSettings,
    outcome_from_frame,
    outcome_to_frame,
    request_from_json,
    request_to_json,
)
from megarl.types import GroupOutcome, RoutingShape, Sample, VersionSpan
from tests.rollout.collecting import request, settings_in
from tests.rollout.test_collector import folder as folder  # the fixture


def over(*messages: tuple[Any, list[Any]]) -> list[tuple[Any, list[Any]]]:
    """What the other end of a socket gets of them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # many sends a frame

        def send() -> None:
            for message, arrays in messages:
                send_frame(ours, make_frame(message, arrays))
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        found = []
        while (frame := receive_frame(theirs)) is not None:
            found.append(frame)
        thread.join()
    return found


ARRAYS = [
    np.arange(7, dtype=np.uint8),
    np.array([True, False]),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.zeros((0, 4, 2), np.uint16),
    np.arange(1000 * 48 * 8, dtype=np.uint16).reshape(1000, 48, 8),
    np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],
    np.array([1.5, np.nan, -np.inf]),
    np.zeros((), np.int64),
]


def test_arrays_come_over_bit_for_bit_and_aligned() -> None:
    ((message, found),) = over(({"a": [1, None, "\ud800"]}, ARRAYS))
    assert message == {"a": [1, None, "\ud800"]}
    assert len(found) == len(ARRAYS)
    for array, sent in zip(found, ARRAYS, strict=True):
        assert (array.dtype, array.shape) == (sent.dtype, sent.shape)
        assert array.tobytes() == np.ascontiguousarray(sent).tobytes()
        assert array.flags.aligned and array.flags.writeable


def test_many_messages_keep_their_order_and_more_arrays_than_a_call_takes() -> None:
    sent = [({"n": n}, [np.full(n % 5, i, np.int32) for i in range(n)]) for n in (0, 3, 1500, 1)]
    found = over(*sent)
    assert [m["n"] for m, _ in found] == [0, 3, 1500, 1]
    for (_, arrays), (_, expected) in zip(found, sent, strict=True):
        assert [a.tolist() for a in arrays] == [e.tolist() for e in expected]


@pytest.mark.parametrize("kept", [1, 15, 16, 30, 90, 300])
def test_half_a_message_is_an_error(kept: int) -> None:
    frame = b"".join(make_frame({"n": 1}, [np.zeros(100, np.int32)]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame[:kept])
        ours.close()
        with pytest.raises(EOFError, match="a message ended after"):
            receive_frame(theirs)


def test_what_is_no_json_is_refused_where_it_is_said() -> None:
    with pytest.raises(TypeError):
        make_frame({"payload": object()})


def sample(index: int, *, steps: int | None, routed: bool, length: int = 9) -> Sample:
    rng = np.random.default_rng(index)
    return Sample(
        prompt_id="p3",
        group=3,
        index=index,
        tokens=rng.integers(1, 99, length).astype(np.int32),
        mask=np.arange(length) >= 4,
        rollout_logprobs=rng.standard_normal(length).astype(np.float32),
        rewards=rng.standard_normal(2).astype(np.float32),
        correct=bool(index % 2),
        truncated=index == 1,
        version_spans=(VersionSpan(1, 0, 2, "a"), VersionSpan(2, 2, 5, "")),
        routing=rng.integers(0, 300, (length - 1, 2, 2)).astype(np.uint16) if routed else None,
        step_rewards=None if steps is None else np.arange(steps, dtype=np.float32),
        step_ends=None if steps is None else np.arange(steps, dtype=np.int32) + 4,
        serial=3,
    )


def test_an_outcome_is_what_it_was() -> None:
    samples = (
        sample(0, steps=2, routed=True),
        sample(1, steps=None, routed=False, length=5),
        sample(2, steps=0, routed=True, length=300),
        sample(3, steps=3, routed=False),
    )
    asked = request(3)
    sent = GroupOutcome(3, samples, attempts=4, tokens=77)
    ((about, arrays),) = over(outcome_to_frame(sent))
    found = outcome_from_frame(about, arrays, asked)
    assert (found.serial, found.failed, found.discarded) == (3, "", False)
    assert (found.attempts, found.tokens) == (4, 77)
    assert len(found.samples) == len(samples)
    for got, expected in zip(found.samples, samples, strict=True):
        for name, value in vars(expected).items():
            other = getattr(got, name)
            if isinstance(value, np.ndarray):
                assert other.dtype == value.dtype and other.tolist() == value.tolist(), name
            else:
                assert other == value, name


@pytest.mark.parametrize(
    "sent", [GroupOutcome(3, failed="why", attempts=5), GroupOutcome(3, discarded=True, tokens=9)]
)
def test_an_outcome_without_samples_too(sent: GroupOutcome) -> None:
    ((about, arrays),) = over(outcome_to_frame(sent))
    assert outcome_from_frame(about, arrays, request(3)) == sent


def test_requests_and_settings_are_what_they_were(folder: Any) -> None:
    asked = request(5, answer=1, deep={"a": [1, 2.5, None]})
    assert request_from_json(json.loads(json.dumps(request_to_json(asked)))) == asked
    for changes in ({}, {"routing": RoutingShape((False, True), 2, 8), "max_in_flight": 9}):
        given = settings_in(folder, **changes)
        assert CollectorSettings.from_json(json.loads(json.dumps(given.to_json()))) == given
