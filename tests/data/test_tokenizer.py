"""Text in, ids out, and back: no token is added or lost on the way."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import DataError


def test_a_prompt_is_encoded_without_added_tokens(tokenizer: Tokenizer) -> None:
    """<pad> <eos> <think> </think> are 0 to 3, the digits 4 to 13, then + - * / =."""
    assert tokenizer.encode("3 + 5 - 2 = <think>") == [7, 14, 9, 15, 6, 18, 2]
    assert tokenizer.encode("8-2</think>6") == [12, 15, 6, 3, 10]


def test_a_response_is_decoded_with_its_marks(tokenizer: Tokenizer) -> None:
    assert tokenizer.response_text([12, 15, 6, 3, 10, 1]) == "8-2</think>6"
    assert tokenizer.response_text([12, 15, 6, 3, 10]) == "8-2</think>6"
    assert tokenizer.response_text([3, 1, 1]) == "</think><eos>"  # only the last ends it
    assert tokenizer.response_text([]) == ""


def test_a_response_ends_at_any_end_token(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model, eos_ids=(5, 1))
    assert tokenizer.eos_ids == (5, 1)
    assert tokenizer.eos_id == 1
    assert tokenizer.finished([9, 5])
    assert tokenizer.finished([9, 1])
    assert not tokenizer.finished([1, 9])
    assert not tokenizer.finished([])


def test_text_without_a_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="3 \\+ x"):
        tokenizer.encode("3 + x")


def test_code_in_the_folder_is_never_run(tiny_model: Path, tmp_path: Path) -> None:
    """K4: a folder that asks for its own tokenizer class does not get it imported."""
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    path.write_text(json.dumps(config))
    with contextlib.suppress(DataError):
        load_tokenizer(folder)
    assert not marker.exists()


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no folder"):
        load_tokenizer(tmp_path / "gpt2")
