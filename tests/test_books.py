"""Books in which a group is missing, or twice, are refused."""

import json
from pathlib import Path

import pytest

from megarl.books import EXPIRED, TRAINED, Books, main, read_books
from megarl.errors import DataError
from megarl.types import Max

GOOD = [
    '{"step": 1, "event": "issued", "groups": {"0": "a", "1": "b"}, "samples": 2}',
    '{"step": 1, "event": "trained", "groups": [0]}',
]


@pytest.mark.parametrize(
    "line, what",
    [
        ('{"step": 1, "event": "trained", "groups": [0]}', "group 0 ends .trained. without"),
        ('{"step": 1, "event": "expired", "groups": [7]}', "group 7 ends .expired. without"),
        ('{"step": 2, "event": "issued", "groups": {"1": "b"}, "samples": 2}', "1 is issued again"),
        ('{"step": 2, "event": "issued", "groups": {"0": "b"}, "samples": 2}', "0 is issued again"),
        ('{"step": 2, "event": "lost", "groups": [1]}', "lost"),
        ("{", "Expecting"),
    ],
)
def test_books_that_do_not_balance_are_refused(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text("\n".join(GOOD))
    assert read_books(path).out == (1,) and read_books(path).samples == 4
    path.write_text("\n".join([*GOOD, line]))
    with pytest.raises(DataError, match=rf"books.jsonl:3: .*{what}"):
        read_books(path)


def test_what_is_written_is_what_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    books, silent = Books(tmp_path / "books.jsonl"), Books(None)
    for one in (books, silent):
        one.issue(1, {0: "a", 1: "b", 2: "a"}, 4)
        one.end(1, TRAINED, [1, 0])
        one.end(1, EXPIRED, [])
    assert books.counts == silent.counts == {"issued": 12, "trained": 8}
    assert main([str(tmp_path)]) == 1
    assert "3 groups (12 samples) issued: 2 trained, 0 filtered" in capsys.readouterr().out
    saved = books.state()
    books.end(2, EXPIRED, [2], "too old")
    assert main([str(tmp_path)]) == 0
    again = Books(tmp_path / "books.jsonl")
    again.load_state(json.loads(json.dumps(saved)))
    assert again.counts == {"issued": 12, "trained": 8}
    assert read_books(tmp_path / "books.jsonl").out == (2,)
    # groups have another size now; the one that was out keeps its own
    again.issue(2, {3: "c"}, 7)
    again.end(2, EXPIRED, [2])
    again.end(2, TRAINED, [3])
    told = {m.name: m.value for m in again.metrics()}
    assert told["books/issued"] == Max(12 + 7) and told["books/trained"] == Max(8 + 7)
    assert told["books/expired"] == Max(4) and told["books/failed"] == Max(0)
    with pytest.raises(KeyError):
        again.end(2, TRAINED, [3])
