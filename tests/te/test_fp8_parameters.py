"""Weights into parameters that are kept in FP8, and out of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model
from tests.te.test_models import assert_same_bits

pytestmark = pytest.mark.dist

WIDE = {  # sides in multiples of 128, as blocks want them
    **{"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128},
    **{"head_dim": 32, "num_hidden_layers": 2, "num_experts": 4},
}
HALF_A_STEP = 2**-4  # of e4m3's 3 bits of mantissa, relative to the number
SMALLEST = 2**-10 / 448  # half of its smallest step, relative to the block's largest number


def test_they_hold_the_rounded_values_and_their_optimizer_starts_from_the_exact_ones(
    te_pool: WorkerPool, tmp_path: Path
) -> None:
    hf = save_model("qwen3_moe tied", tmp_path / "model", torch.bfloat16, **WIDE)
    given = load_file(hf / "model.safetensors")
    (found,) = te_pool.run("tests.te.work_fp8:read_into_fp8", world=1, hf=hf)
    kinds = {name.split(".", 3)[3].rstrip("0123456789") for name in found["fp8"]}
    assert kinds == {
        *("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"),
        *("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"),
        *("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
    }
    rounded = found["before"].keys()
    assert len(rounded) == 2 * 4 + 3 + 4 * 3  # q, k, v, o; a dense layer; a layer of experts
    assert found["exported"].keys() == given.keys()
    for name, tensor in given.items():
        out = found["exported"][name]
        assert out.dtype == torch.bfloat16
        if name not in rounded:
            assert torch.equal(out, tensor), name
            continue
        assert torch.equal(found["before"][name], tensor), name
        gap, value = (out.double() - tensor.double()).abs(), tensor.double().abs()
        # and of bf16, in which the codes' values come out
        bound = value * (HALF_A_STEP + 2**-8) + value.max() * SMALLEST * 2
        assert (gap <= bound).all(), name
        assert 0.01 < gap.sum() / value.sum() < HALF_A_STEP, name


def test_a_reference_policy_takes_their_place_and_gives_it_back(
    te_pool: WorkerPool, tmp_path: Path
) -> None:
    """Codes and scales move, bit for bit: rounding what codes stand for would make others."""
    hf, other = (
        save_model("qwen3_moe tied", tmp_path / str(seed), torch.bfloat16, seed=seed, **WIDE)
        for seed in (1, 2)
    )
    (found,) = te_pool.run("tests.te.work_fp8:reference_in_fp8", world=1, hf=hf, other=other)
    assert_same_bits(found["inside"], found["reference"])
    assert_same_bits(found["after"], found["own"])
    parts = {name.split(": ")[1] for name in found["own"] if ": " in name}
    assert parts == {
        f"{by}wise_{what}" for by in ("row", "column") for what in ("data", "scale_inv")
    }
    codes = [name for name in found["own"] if name.endswith("wise_data")]
    assert all(not torch.equal(found["own"][n], found["reference"][n]) for n in codes)
