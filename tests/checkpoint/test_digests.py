"""Digests of imported tensors: of every family those of its files, whatever parts they come in."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.checkpoint.digests import (
    Digests,
    DigestSum,
    TensorDigest,
    differences,
    digests_json,
    parse_digests,
)
from megarl.checkpoint.streamed import write_weights
from megarl.errors import DataError
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from megarl.ops.digest import digest
from megarl.types import TensorSpec
from tests.helpers.families import MODELS, save_model
from tests.helpers.fp8_blocks import edit_config, quantised

Tensors = dict[str, Tensor]


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def digests_of(tensors: Tensors) -> Digests:
    """Of whole tensors, each at once."""
    return {n: TensorDigest(digest(t), tuple(t.shape), dtype_of(t)) for n, t in tensors.items()}


def imported(hf: Path, out: Path) -> Digests:
    out.mkdir()
    return write_weights(out, open_checkpoint(hf), read_spec(hf))


# --- of imports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_digests_of_an_import_are_those_of_the_files_tensors(tmp_path: Path, name: str) -> None:
    """Fused experts, heads, gate and up, copies for layers behind the last; vocabulary of 30, which
    Megatron pads to 64.
    """
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)
    assert imported(hf, tmp_path / "out") == digests_of(load_file(hf / "model.safetensors"))


def test_of_fp8_blocks_they_are_of_the_values(tmp_path: Path) -> None:
    source = save_model("deepseek_v3", tmp_path / "source")
    hf, values = quantised(source, tmp_path / "hf")
    assert imported(hf, tmp_path / "out") == digests_of(values)


def test_of_wider_files_they_are_of_the_values_that_the_checkpoint_keeps(tmp_path: Path) -> None:
    hf = save_model("glm4_moe without qk norm", tmp_path / "hf", torch.float32)
    edit_config(hf, dtype="bfloat16")
    given = load_file(hf / "model.safetensors")
    kept = {n: t if "correction_bias" in n else t.bfloat16() for n, t in given.items()}
    assert imported(hf, tmp_path / "out") == digests_of(kept)


def test_a_copy_that_files_lack_has_the_digest_of_what_it_repeats(tmp_path: Path) -> None:
    hf = save_model("deepseek_v3", tmp_path / "hf", torch.bfloat16)
    given = load_file(hf / "model.safetensors")
    lacking = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    assert given.keys() >= set(lacking)
    kept = {n: t for n, t in given.items() if n not in lacking}
    save_file(kept, hf / "model.safetensors", metadata={"format": "pt"})
    assert imported(hf, tmp_path / "out") == digests_of(given)


# --- of parts -------------------------------------------------------------------------------------

GIVEN: Tensors = {
    "matrix": torch.randn(7, 12, generator=torch.Generator().manual_seed(0)),
    "experts": torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "bias": torch.randn(9, generator=torch.Generator().manual_seed(2)),
    "codes": torch.arange(24, dtype=torch.uint8).view(4, 6).view(torch.float8_e4m3fn),
}
SPECS = [TensorSpec(n, tuple(t.shape), dtype_of(t)) for n, t in GIVEN.items()]
Part = tuple[str, Tensor, dict[str, Any]]


def whole() -> list[Part]:
    return [(name, tensor, {}) for name, tensor in GIVEN.items()]


def by_entry() -> list[Part]:
    """Last entry first."""
    first = [p for p in whole() if p[0] != "experts"]
    entries = GIVEN["experts"]
    return [*first, *(("experts", entries[i], {"index": i}) for i in (4, 0, 3, 1, 2))]


def in_pieces() -> list[Part]:
    """Of rows, of columns, and of an entry."""
    matrix, experts = GIVEN["matrix"], GIVEN["experts"]
    rest = [p for p in whole() if p[0] in ("bias", "codes")]
    rows = [("matrix", matrix[a:b], {"offset": [a, 0]}) for a, b in ((4, 7), (0, 4))]
    sides = [
        ("experts", experts[i, :, a:b], {"index": i, "offset": [0, a]})
        for a, b in ((3, 4), (0, 3))
        for i in range(5)
    ]
    return [*rows, *rest, *sides]


@pytest.mark.parametrize("parts", [whole, by_entry, in_pieces])
def test_parts_add_up_whatever_they_are(parts: Callable[[], list[Part]]) -> None:
    found = DigestSum(SPECS)
    for name, values, where in parts():
        found.add(name, values, **where)
    assert found.digests() == digests_of(GIVEN)


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_parts_of_several_processes_add_up(processes: int) -> None:
    """What they tell each other passes through JSON."""
    sums = []
    for rank in range(processes):
        mine = DigestSum(SPECS)
        for name, values, where in in_pieces()[rank::processes]:
            mine.add(name, values, **where)
        sums.append(json.loads(json.dumps(mine.sums())))
    total = DigestSum(SPECS)
    for one in reversed(sums):
        total.merge(one)
    assert total.digests() == digests_of(GIVEN)


def test_threads_may_share_one() -> None:
    tensor = torch.arange(40_000, dtype=torch.int32).view(2000, 20)
    found = DigestSum([TensorSpec("t", (2000, 20), "int32")])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: found.add("t", tensor[i], i), range(2000)))
    assert found.digests() == digests_of({"t": tensor})


def test_tensors_that_are_not_complete_are_all_named() -> None:
    found = DigestSum(SPECS)
    found.add("matrix", GIVEN["matrix"][:5], offset=[0, 0])
    found.add("experts", GIVEN["experts"])
    found.add("experts", GIVEN["experts"][2], 2)
    found.add("codes", GIVEN["codes"])
    with pytest.raises(DataError) as error:
        found.digests()
    assert str(error.value).splitlines() == [
        "3 tensors are not complete:",
        "  matrix: 60 of 84 elements came",
        "  experts: 144 of 120 elements came",
        "  bias: 0 of 9 elements came",
    ]


def test_what_is_not_the_models_is_refused() -> None:
    found = DigestSum(SPECS)
    with pytest.raises(DataError, match="tensor other is not part of the model"):
        found.add("other", torch.zeros(3))
    with pytest.raises(DataError, match="tensor bias: found bfloat16; the model's is float32"):
        found.add("bias", GIVEN["bias"].bfloat16())
    for wrong in (torch.zeros(10), torch.zeros(9, 1)):
        with pytest.raises(RuntimeError, match="digest_partial"):
            found.add("bias", wrong)


def test_an_empty_tensor_must_come_as_well() -> None:
    found = DigestSum([TensorSpec("none", (0, 4), "float32")])
    with pytest.raises(DataError, match="none: 0 of 0"):
        found.digests()
    found.add("none", torch.zeros(0, 4))
    assert found.digests() == digests_of({"none": torch.zeros(0, 4)})


# --- compared and kept ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (lambda t: t.flip(0), r"bias: digest [0-9a-f]{16} in files, [0-9a-f]{16} in weights"),
        (lambda t: -t, r"bias: digest [0-9a-f]{16} in files, [0-9a-f]{16} in weights"),
        (lambda t: t + torch.eye(9)[3] * 1e-6, r"bias: digest \S+ in files, \S+ in weights"),
        (lambda t: t[:8], r"bias: \[9\] float32 in files, \[8\] float32 in weights"),
        (lambda t: t.bfloat16(), r"bias: \[9\] float32 in files, \[9\] bfloat16 in weights"),
        (None, "bias: only in files"),
    ],
)
def test_every_difference_is_named(changed: Callable[[Tensor], Tensor] | None, line: str) -> None:
    other = {n: t for n, t in GIVEN.items() if n != "bias"}
    other |= {} if changed is None else {"bias": changed(GIVEN["bias"])}
    first, second = digests_of(GIVEN), digests_of(other)
    (found,) = differences(first, second, expects="files", finds="weights")
    assert re.fullmatch(line, found)
    assert not differences(first, first, expects="files", finds="weights")
    if changed is None:
        more = differences(second, first, expects="files", finds="weights")
        assert more == ["bias: only in weights"]


def test_they_survive_their_file_and_a_damaged_one_is_refused() -> None:
    digests = digests_of(GIVEN)
    kept = json.loads(json.dumps(digests_json(digests)))
    assert parse_digests(kept) == digests
    entry = kept["tensors"]["bias"]
    for value in (
        {},
        {**kept, "format": 2},
        {"format": 1, "tensors": []},
        {"format": 1, "tensors": {"bias": entry["digest"]}},
        {"format": 1, "tensors": {"bias": {**entry, "shape": 9}}},
        {"format": 1, "tensors": {"bias": {"digest": entry["digest"]}}},
    ):
        with pytest.raises(DataError, match=r"digests\.json"):
            parse_digests(value)
