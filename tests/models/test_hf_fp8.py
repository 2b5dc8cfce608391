"""FP8 blocks in folders: values from e4m3's definition, slices, and everything that is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_io import open_checkpoint
from tests.helpers.fp8_blocks import BLOCKS, as_codes, by_entry, finite_codes, grid, some_scales

Tensors = dict[str, Tensor]
SHAPES = {  # name -> shape
    "a.weight": (130, 257),  # no multiple of a block
    "b.weight": (256, 128),
    "one_row.weight": (1, 300),
    "experts.down_proj": (3, 140, 129),  # stacked
}


def write(folder: Path, tensors: Tensors, quantization: Any, **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    values = {"quantization_config": quantization, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def made(
    folder: Path,
    *,
    block: tuple[int, int] = (128, 128),
    scales: torch.dtype = torch.float32,
    dtype: str = "float32",
) -> tuple[Path, dict[str, NDArray[Any]]]:
    """A folder of ``SHAPES`` and a plain tensor, and its values in f32."""
    tensors: Tensors = {"norm.weight": torch.arange(5.0)}
    expected = {"norm.weight": np.arange(5, dtype=np.float32)}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        codes = finite_codes(shape, seed)
        scale = some_scales(grid(shape, block), seed, scales)
        tensors |= {name: as_codes(codes), f"{name}_scale_inv": scale}
        expected[name] = by_entry(codes, scale, block)
    quantization = {**BLOCKS, "weight_block_size": list(block)}
    return write(folder, tensors, quantization, dtype=dtype), expected


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128), (48, 1000)])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_values_are_code_times_scale(
    tmp_path: Path, block: tuple[int, int], scales: torch.dtype
) -> None:
    folder, expected = made(tmp_path / "m", block=block, scales=scales)
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, values in expected.items():
        assert checkpoint.shape(name) == values.shape
        assert checkpoint.dtype(name) == torch.float32
        assert np.array_equal(checkpoint.get(name).numpy(), values), name


def test_values_are_rounded_once_to_the_dtype_of_config_json(tmp_path: Path) -> None:
    folder, expected = made(tmp_path / "m", dtype="bfloat16")
    checkpoint = open_checkpoint(folder)
    for name in SHAPES:
        bits = expected[name].view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # ties to even
        found = checkpoint.get(name)
        assert found.dtype == checkpoint.dtype(name) == torch.bfloat16
        assert np.array_equal(found.float().numpy(), nearest.view(np.float32)), name
    assert checkpoint.dtype("norm.weight") == torch.float32  # which files hold as it is


@pytest.mark.parametrize("block", [(128, 128), (5, 7)])
def test_slices_are_those_of_the_whole(tmp_path: Path, block: tuple[int, int]) -> None:
    folder, expected = made(tmp_path / "m", block=block)
    checkpoint = open_checkpoint(folder)
    spans: list[tuple[int, int]] = [(0, 1), (127, 129), (128, 130), (3, 97), (64, 64)]
    whole = expected["a.weight"]
    for low, high in spans:
        found = checkpoint.get("a.weight", rows=(low, high))
        assert np.array_equal(found.numpy(), whole[low:high])
        found = checkpoint.get("a.weight", columns=(low, high))
        assert np.array_equal(found.numpy(), whole[:, low:high])
        found = checkpoint.get("a.weight", rows=(low, high), columns=(100, 257))
        assert np.array_equal(found.numpy(), whole[low:high, 100:])
    stack = expected["experts.down_proj"]
    for entry in range(3):
        found = checkpoint.get("experts.down_proj", entry, rows=(100, 140), columns=(2, 129))
        assert np.array_equal(found.numpy(), stack[entry, 100:, 2:])
    found = checkpoint.get("experts.down_proj", rows=(1, 3), columns=(9, 131))
    assert np.array_equal(found.numpy(), stack[1:, 9:131])


def test_a_slice_reads_the_bytes_of_its_blocks_alone(tmp_path: Path) -> None:
    """All other codes are NaN, which are refused where they are read."""
    codes = np.full((400, 300), 0x7F, dtype=np.uint8)
    codes[256:384, 128:256] = 0x38  # 1.0
    scales = torch.full((4, 3), 0.5)
    folder = write(
        tmp_path / "m", {"w": as_codes(codes), "w_scale_inv": scales}, BLOCKS, dtype="float32"
    )
    found = open_checkpoint(folder).get("w", rows=(300, 310), columns=(128, 200))
    assert torch.equal(found, torch.full((10, 72), 0.5))
    with pytest.raises(DataError, match=r"FP8 tensor w is damaged: codes times scales"):
        open_checkpoint(folder).get("w", rows=(300, 310), columns=(128, 257))


@pytest.mark.parametrize(
    ("scale", "says"),
    [(float("nan"), "negative or NaN"), (-1.0, "negative or NaN"), (float("inf"), "not finite")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damaged_scales_are_refused_by_name(
    tmp_path: Path, scale: float, says: str, dtype: torch.dtype
) -> None:
    codes = as_codes(np.full((2, 130, 4), 0x38, dtype=np.uint8))
    scales = torch.ones(2, 2, 1, dtype=dtype)
    scales[1, 1] = scale
    folder = write(tmp_path / "m", {"w": codes, "w_scale_inv": scales}, BLOCKS, dtype="bfloat16")
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.get("w", 0), torch.ones(130, 4, dtype=torch.bfloat16))
    with pytest.raises(DataError, match=rf"FP8 tensor w\[1\] is damaged: .*{says}"):
        checkpoint.get("w")


def test_a_block_of_zeros_is_zero_whatever_its_scale(tmp_path: Path) -> None:
    """D12: quantisers of others write scale 0 there."""
    codes = as_codes(np.zeros((130, 5), dtype=np.uint8))
    scales = torch.tensor([[0.0], [1e-30]])
    folder = write(tmp_path / "m", {"w": codes, "w_scale_inv": scales}, BLOCKS)
    assert torch.equal(open_checkpoint(folder).get("w"), torch.zeros(130, 5))


# ---- folders that are refused --------------------------------------------------------------------


@pytest.fixture
def parts() -> Tensors:
    codes = as_codes(finite_codes((130, 257), 0))
    plain = torch.ones(4, 4)
    return {"x.weight": codes, "x.weight_scale_inv": torch.ones(2, 3), "y.weight": plain}


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_checkpoint(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ("fp8", ["quantization_config: found 'fp8'", "an object"]),
        ({"quant_method": "gptq", "bits": 4}, ["'gptq'", "fp8 (e4m3 codes", "gptq"]),
        ({"quant_method": "compressed-tensors"}, ["'compressed-tensors'", "accepted: fp8"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["'bitsandbytes'"]),
        ({}, ["quant_method: found None"]),
        ({**BLOCKS, "fmt": "e5m2"}, ["fmt: found 'e5m2'", "accepted: 'e4m3'"]),
        ({**BLOCKS, "activation_scheme": "static"}, ["activation_scheme: found 'static'"]),
        ({**BLOCKS, "scale_fmt": "e3m0"}, ["scale_fmt: found 'e3m0'", "ue8m0"]),
        ({**BLOCKS, "weight_block_size": None}, ["weight_block_size: found None", "[128, 128]"]),
        ({**BLOCKS, "weight_block_size": [128]}, ["weight_block_size: found [128]"]),
        ({**BLOCKS, "weight_block_size": [128, 0]}, ["weight_block_size: found [128, 0]"]),
        ({**BLOCKS, "weight_block_size": [True, 128]}, ["weight_block_size: found [True, 128]"]),
        ({**BLOCKS, "ignored_layers": "lm_head"}, ["ignored_layers: found 'lm_head'"]),
        ({**BLOCKS, "kv_cache_scheme": {"bits": 8}}, ["kv_cache_scheme", "one of", "fmt"]),
        (
            {**BLOCKS, "fmt": "e5m2", "weight_block_size": 128},
            ["2 faults", "fmt: found 'e5m2'", "weight_block_size: found 128"],
        ),
    ],
)
def test_other_quantisation_is_refused_with_what_is_read(
    tmp_path: Path, parts: Tensors, quantization: Any, says: list[str]
) -> None:
    message = refusal(write(tmp_path / "m", parts, quantization))
    for part in ["config.json: quantization_config", *says]:
        assert part in message


@pytest.mark.parametrize(
    "quantization",
    [
        {**BLOCKS, "scale_fmt": "ue8m0"},
        {**BLOCKS, "modules_to_not_convert": ["y", "lm_head"], "ignored_layers": None},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
)
def test_spellings_of_the_same_are_read(tmp_path: Path, parts: Tensors, quantization: Any) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m", parts, quantization))
    assert sorted(checkpoint.names()) == ["x.weight", "y.weight"]
    with pytest.raises(DataError, match=r"holds no tensor x\.weight_scale_inv"):
        checkpoint.get("x.weight_scale_inv")


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without("x.weight_scale_inv"), "missing x.weight_scale_inv [2, 3], of F8_E4M3 x.weight"),
        (without("x.weight"), "x.weight_scale_inv has no codes: x.weight is not there"),
        (
            lambda t: t.update({"y.weight_scale_inv": torch.ones(1, 1)}),
            "y.weight_scale_inv has no codes: y.weight is float32",
        ),
        (
            lambda t: t.update({"x.weight_scale_inv": torch.ones(3, 2)}),
            "found [3, 2]; x.weight [130, 257] in blocks of [128, 128] implies [2, 3]",
        ),
        (
            lambda t: t.update({"x.weight_scale_inv": torch.ones(1)}),
            "x.weight_scale_inv: found [1]; x.weight [130, 257]",
        ),
        (
            lambda t: t.update({"x.weight_scale": t.pop("x.weight_scale_inv")}),
            "x.weight_scale: a scale of a whole tensor is not read",
        ),
        (
            lambda t: t.update({"b.bias": as_codes(finite_codes((9,), 3))}),
            "b.bias: found [9] in F8_E4M3; accepted: matrices",
        ),
        (
            lambda t: t.update({"x.weight_scale_inv": as_codes(finite_codes((2, 3), 3))}),
            "x.weight_scale_inv: found F8_E4M3; accepted: F32 or BF16",
        ),
        (
            lambda t: t.update({"x.weight": torch.zeros(130, 257).to(torch.float8_e5m2)}),
            "tensor x.weight has dtype F8_E5M2; accepted: F32, BF16, F8_E4M3",
        ),
        (
            lambda t: t.update({"y.weight": torch.zeros(4, 4, dtype=torch.int8)}),
            "tensor y.weight has dtype I8; accepted: F32, BF16, F8_E4M3",
        ),
        (
            lambda t: t.update({"y.weight": torch.zeros(4, 4, dtype=torch.float16)}),
            "tensor y.weight has dtype F16; accepted: F32, BF16, F8_E4M3",
        ),
    ],
)
def test_tensors_that_do_not_pair_are_named(
    tmp_path: Path, parts: Tensors, edit: Callable[[Tensors], Any], says: str
) -> None:
    edit(parts)
    assert says in refusal(write(tmp_path / "m", parts, BLOCKS))


@pytest.mark.parametrize("module", ["x", "model", "model.x"])
def test_codes_in_a_module_that_config_json_excludes(tmp_path: Path, module: str) -> None:
    codes = as_codes(finite_codes((4, 4), 0))
    tensors = {"model.x.weight": codes, "model.x.weight_scale_inv": torch.ones(1, 1)}
    quantization = {**BLOCKS, "modules_to_not_convert": ["model.x.w", "el.x", module]}
    message = refusal(write(tmp_path / "m", tensors, quantization))
    assert (
        f"model.x.weight is F8_E4M3, but config.json's quantization_config says that {module} "
        in message
    )


def test_tensors_and_config_json_must_both_say_so(tmp_path: Path, parts: Tensors) -> None:
    message = refusal(write(tmp_path / "silent", parts, None))
    assert "1 tensors are F8_E4M3, but config.json has no quantization_config: x.weight" in message
    plain = {"y.weight": parts["y.weight"]}
    message = refusal(write(tmp_path / "plain", plain, BLOCKS))
    assert "config.json has a quantization_config, but no tensor is F8_E4M3" in message
    scales = {**plain, "y.weight_scale_inv": torch.ones(1, 1)}
    message = refusal(write(tmp_path / "scales", scales, None))
    assert (
        "scales of FP8, but config.json has no quantization_config: y.weight_scale_inv" in message
    )
