"""Rows and entries of GPT-OSS: where each lies, whatever splits it. Round trips of whole models are
in ``test_mapping.py``.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import read_spec

Saved = Callable[[str], Path]
LAYER = "decoder.layers.1."


def rows_of(ids: Sequence[float], width: int) -> Tensor:
    """[len(ids), width], every entry of a row its id."""
    return torch.tensor(ids, dtype=torch.float32)[:, None].repeat(1, width)


def shards_of(mapping: ModelMapping, name: str, full: Sequence[Tensor], size: int) -> list[Tensor]:
    return [mapping.to_megatron(name, full, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_interleaved_columns_are_gate_rows_then_up_rows(saved: Saved, size: int) -> None:
    """Column 2i of an expert is gate i, column 2i + 1 up i; here gates are 0.., ups 100.."""
    mapping = mapping_for(read_spec(saved("gpt_oss")))
    ids = [float(i // 2 + 100 * (i % 2)) for i in range(40)]
    matrix, bias = rows_of(ids, 32).T.contiguous(), torch.tensor(ids)
    share = 20 // size
    for kind, tensor in (("weight", matrix), ("bias", bias)):
        name = LAYER + f"mlp.experts.local_experts.5.linear_fc1.{kind}"
        shards = shards_of(mapping, name, [tensor], size)
        for rank, shard in enumerate(shards):
            mine = range(rank * share, (rank + 1) * share)
            expected = rows_of([*mine, *(100 + i for i in mine)], 32)
            assert torch.equal(shard, expected if kind == "weight" else expected[:, 0])
        ((hf, back),) = mapping.to_hf(name, shards)
        assert hf.startswith("model.layers.1.mlp.experts.gate_up_proj")
        assert torch.equal(back, tensor)


def test_a_stacked_expert_is_an_entry_in_both_spellings(saved: Saved) -> None:
    mapping = mapping_for(read_spec(saved("gpt_oss")))
    for spelling in ("local_experts.6.linear_fc{}.{}", "linear_fc{}.{}6"):
        for number, kind in ((1, "weight"), (1, "bias"), (2, "weight"), (2, "bias")):
            name = f"{LAYER}mlp.experts.{spelling.format(number, kind)}"
            hf = f"model.layers.1.mlp.experts.{('gate_up_proj', 'down_proj')[number - 1]}"
            assert mapping.slice_of(name) == 6 and mapping.is_expert(name)
            assert mapping.hf_names(name) == (hf + ("_bias" if kind == "bias" else ""),)
    assert mapping.slice_of(LAYER + "mlp.router.bias") is None


def test_sinks_are_split_by_heads(saved: Saved) -> None:
    mapping = mapping_for(read_spec(saved("gpt_oss")))
    name = LAYER + "self_attention.core_attention.softmax_offset"
    sinks = torch.arange(8.0)
    left, right = shards_of(mapping, name, [sinks], 2)
    assert (left.tolist(), right.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert mapping.to_hf(name, [left, right])[0][0] == "model.layers.1.self_attn.sinks"
