"""Of many failing ranks, the one that explains the others."""

import json
from pathlib import Path

import pytest

from megarl.monitor.first_error import (
    RankError,
    cause_of,
    first_error,
    killed_ranks,
    message_of,
    read_errors,
)


def error(time: float, rank: int, kind: str, message: str = "") -> RankError:
    return RankError(time, rank, "node1", "step 3", kind, message)


REAL = [
    ("ValueError", "bad value"),
    ("FloatingPointError", "gradient norm nan"),
    ("DataError", "sample 3 has 99 tokens"),
    ("ServerError", "http://a:1: connection refused"),  # a server's death is a cause
    ("torch.OutOfMemoryError", "CUDA out of memory"),
    ("RuntimeError", "shape [2] is invalid for input of size 3"),
]
ECHO = [
    ("RuntimeError", "[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3456"),
    ("RuntimeError", "Timed out waiting 600000ms for recv operation to complete"),
    ("RuntimeError", "Rank 0 failed: Gloo connectFullMesh failed with ..."),
    ("torch.distributed.DistBackendError", "NCCL error: remote process exited"),
    ("DistNetworkError", "The client socket has failed to connect"),
    ("ConnectionResetError", "[Errno 104]"),
    ("BrokenPipeError", ""),
    ("RunError", "collecting rollouts failed on rank 0: ServerError: http://a:1 is gone"),
    ("SignalException", "Process got signal: 15"),
]


@pytest.mark.parametrize("kind, message", REAL)
@pytest.mark.parametrize("echo, text", ECHO)
def test_a_cause_beats_an_echo_even_if_clocks_say_otherwise(
    kind: str, message: str, echo: str, text: str
) -> None:
    errors = [error(1.0, 0, echo, text), error(2.0, 1, kind, message), error(3.0, 2, echo, text)]
    first = first_error(errors)
    assert first is not None and first.rank == 1


def test_among_causes_the_earliest_counts_and_then_the_lowest_rank() -> None:
    errors = [error(2.0, 0, "KeyError"), error(1.0, 5, "ValueError"), error(1.0, 3, "ValueError")]
    first = first_error(errors)
    assert first is not None and first.rank == 3


def test_echoes_alone_still_give_the_earliest() -> None:
    first = first_error([error(2.0, 0, "BrokenPipeError"), error(1.0, 1, "ConnectionResetError")])
    assert first is not None and first.rank == 1
    assert first_error([]) is None


def test_the_message_says_what_where_and_how_many_followed() -> None:
    first = RankError(
        1.0, 3, "node7", "step 12", "ValueError", "bad value",
        'Traceback\n  File "loop.py", line 3, in run\n    x()\n  File "step.py", line 9, in x\n',
    )  # fmt: skip
    text = message_of(first, [first, error(2.0, 0, "BrokenPipeError")])
    assert text.splitlines() == [
        "rank 3 on node7 failed first in step 12:",
        "ValueError: bad value",
        'at "step.py", line 9, in x',
        "(1 more failed after it: rank 0)",
    ]


def test_files_are_read_and_a_torn_one_is_not_passed_over(tmp_path: Path) -> None:
    value = {"time": 5.0, "rank": 0, "host": "n", "where": "w", "error": "BrokenPipeError"}
    (tmp_path / "rank_0.json").write_text(json.dumps({**value, "message": "", "traceback": ""}))
    (tmp_path / "rank_12.json").write_text('{"time": 1')
    errors = read_errors(tmp_path)
    assert [e.rank for e in errors] == [0, 12]
    first = first_error(errors)
    assert first is not None and "rank_12.json" in first.message
    assert read_errors(tmp_path / "nowhere") == []


def test_ranks_ended_by_a_signal_are_read_from_torchruns_summary():
    log = """
Failures:
[1]:
  time      : 2026-11-29_20:44:09
  host      : node1
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 22400)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 22399)
[2]:
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 22401)
"""
    assert killed_ranks([log]) == ["rank 1 was ended by signal 9 (out of memory? see dmesg)"]
    assert killed_ranks([]) == []


def summary(**codes: int) -> str:
    """Of torchrun, as it was when ranks r0, r1, ... ended so."""
    return "".join(
        f"[0]:\n  rank      : {rank[1:]} (local_rank: 0)\n  exitcode  : {code} (pid: 7)\n"
        for rank, code in codes.items()
    )


def test_a_restart_mends_what_ended_by_a_signal_but_not_what_refused_its_settings(
    tmp_path: Path,
) -> None:
    def lasts(**codes: int) -> bool | None:
        cause = cause_of(tmp_path, [summary(**codes)])
        return None if cause is None else cause.lasting

    assert lasts(r0=1, r1=-11) is False
    assert lasts(r0=-15, r1=2) is True
    assert lasts(r0=1, r1=-15) is None and lasts(r0=12) is None  # nothing is known of it
    value = {"time": 1.0, "rank": 1, "error": "DataError", "lasting": True}
    (tmp_path / "rank_1.json").write_text(json.dumps(value))
    assert lasts(r0=-15, r1=1) is True
    (tmp_path / "rank_1.json").write_text(json.dumps(value | {"error": "BrokenPipeError"}))
    assert lasts(r0=-9, r1=1) is False  # an echo of the signal
    (tmp_path / "rank_1.json").write_text(json.dumps({"time": 1.0, "rank": 1, "error": "E"}))
    assert lasts(r1=1) is False  # as older versions wrote it
