"""Parameters read slab by slab into their place: what the mapping makes of whole tensors, and not a
byte more is read than a shard has.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models import hf_io, hf_parameters
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_parameters import read_parameter
from megarl.models.sharded import megatron_mapping, parameter_names
from megarl.models.spec import read_spec
from tests.helpers.families import MODELS, save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {n: save_model(n, folder / str(i), torch.bfloat16) for i, n in enumerate(MODELS)}


@pytest.mark.parametrize("slab", [1, 300, 2**24])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_filled_in_slabs_of_any_size(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, slab: int, ranks: int
) -> None:
    monkeypatch.setattr(hf_parameters, "SLAB", slab)
    for hf in models.values():
        mapping, source = megatron_mapping(read_spec(hf)), open_checkpoint(hf)
        for name in parameter_names(mapping):
            index = mapping.slice_of(name)
            whole = [source.get(n, index) for n in mapping.hf_names(name)]
            dtype = whole[0].dtype
            for rank in range(ranks):
                shard = torch.full(mapping.shape(name, ranks), float("nan"), dtype=dtype)
                read_parameter(source, mapping, name, shard, rank, ranks)
                assert torch.equal(shard, mapping.to_megatron(name, whole, rank, ranks)), name


def test_a_shard_in_another_dtype_is_rounded_once(models: dict[str, Path]) -> None:
    """Whether a parameter lies as its tensors do or in another order."""
    hf = models["gpt_oss"]
    mapping, source = megatron_mapping(read_spec(hf)), open_checkpoint(hf)
    for name in parameter_names(mapping):
        shard = torch.empty(mapping.shape(name), dtype=torch.float32)
        read_parameter(source, mapping, name, shard)
        index = mapping.slice_of(name)
        whole = [source.get(n, index).float() for n in mapping.hf_names(name)]
        assert torch.equal(shard, mapping.to_megatron(name, whole)), name


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen3_moe yarn", 2), ("llama", 2), ("deepseek_v3", 2), ("deepseek_v3", 4), ("gpt_oss", 4)],
)
def test_a_rank_reads_what_it_holds_and_no_more(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    """All ranks together read what is split once, and what is not once each."""
    mapping, source = megatron_mapping(read_spec(models[name])), open_checkpoint(models[name])
    count = 0

    def counting(handle: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal count
        got = os.preadv(handle, buffers, offset)
        count += got
        return got

    monkeypatch.setattr(hf_io, "os", type("os", (), {"preadv": staticmethod(counting)}))
    for parameter in parameter_names(mapping):
        sizes: list[int] = []
        index = mapping.slice_of(parameter)
        for hf in mapping.hf_names(parameter):
            tensor: Tensor = source.get(hf, index)
            sizes.append(tensor.numel() * tensor.element_size())
        times = 1 if mapping.is_sharded(parameter) else ranks
        count = 0
        for rank in range(ranks):
            shape = mapping.shape(parameter, ranks)
            shard = torch.empty(shape, dtype=source.dtype(mapping.hf_names(parameter)[0]))
            read_parameter(source, mapping, parameter, shard, rank, ranks)
        assert count == times * sum(sizes), parameter


@pytest.mark.parametrize("name", ["qwen3_moe yarn", "deepseek_v3", "gpt_oss"])
def test_what_is_read_is_told_once_with_its_place(models: dict[str, Path], name: str) -> None:
    """Put together by what ``seen`` is told, the tensors are the folder's."""
    mapping, source = megatron_mapping(read_spec(models[name])), open_checkpoint(models[name])
    rebuilt = {n: torch.full(source.shape(n), float("nan")) for n in source.names()}

    def seen(n: str, values: Tensor, index: int | None, *, offset: Sequence[int]) -> None:
        target = rebuilt[n] if index is None else rebuilt[n][index]
        for d, (begin, size) in enumerate(zip(offset, values.shape, strict=True)):
            target = target.narrow(d, begin, size)
        assert target.isnan().all()
        target.copy_(values)

    for parameter in parameter_names(mapping):
        dtype = source.dtype(mapping.hf_names(parameter)[0])
        for rank in range(2 if mapping.is_sharded(parameter) else 1):
            ranks = 2 if mapping.is_sharded(parameter) else 1
            shard = torch.empty(mapping.shape(parameter, ranks), dtype=dtype)
            read_parameter(source, mapping, parameter, shard, rank, ranks, seen)
    copies = mapping.copies()
    for n, tensor in rebuilt.items():
        assert n in copies or torch.equal(tensor, source.get(n).float()), n
