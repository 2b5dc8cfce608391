"""Tensors in FP8 blocks: their codes and scales by definition, in files as their bytes say."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.errors import DataError
from megarl.models.fp8_export import SCALES, Fp8Export, fp8_weight
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import Entry, write_checkpoint
from megarl.types import TensorSpec
from tests.helpers.fp8_blocks import by_entry, raw_header
from tests.ops.test_fp8_block import plain_quant

BLOCK = (128, 128)
SHAPES = [(130, 257), (1, 300), (128, 128), (300, 1), (1, 1), (257, 64), (255, 384)]
GRIDS = [[2, 3], [1, 3], [1, 1], [3, 1], [1, 1], [3, 1], [2, 3]]
NORM = TensorSpec("norm.weight", (5,), "bfloat16")


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """bf16 over many powers of two, so that small codes and zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-14, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(sizes)).bfloat16()


def with_zeros(blocks: Sequence[tuple[int, int]]) -> Tensor:
    weight = values((130, 257), 9)
    for i, j in blocks:
        weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = 0
    return weight


ZEROS = {  # blocks that are zero
    "one": with_zeros([(0, 1)]),
    "at an edge": with_zeros([(1, 2)]),
    "a row of them": with_zeros([(0, 0), (0, 1), (0, 2)]),
    "all": torch.zeros(130, 257, dtype=torch.bfloat16),
    "minus zeros": -torch.zeros(5, 140, dtype=torch.bfloat16),
    "one row": torch.zeros(1, 300, dtype=torch.bfloat16),
}
WEIGHTS = {f"w{i}.weight": values(shape, i) for i, shape in enumerate(SHAPES)}
WEIGHTS |= {f"{name}.weight": weight for name, weight in ZEROS.items()}


def export_of(weights: dict[str, Tensor], scales: str) -> Fp8Export:
    """Of tensors that make up no model."""
    specs = [NORM]
    for name, weight in weights.items():
        rows, columns = weight.shape
        specs.append(TensorSpec(name, (rows, columns), "float8_e4m3fn"))
        grid = (-(-rows // 128), -(-columns // 128))
        specs.append(TensorSpec(f"{name}_scale_inv", grid, "float32"))
    return Fp8Export(scales, tuple(specs), frozenset(weights), ("model.head",))


def parts(
    export: Fp8Export, tensors: Iterable[tuple[str, Tensor | Entry]]
) -> Iterator[tuple[str, Tensor | Entry]]:
    for name, tensor in tensors:
        yield from export.parts(name, tensor)


def write(folder: Path, weights: dict[str, Tensor], scales: str) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text('{"torch_dtype": "bfloat16", "kept": [1]}')
    export = export_of(weights, scales)
    tensors = {**weights, NORM.name: torch.arange(5.0).bfloat16()}
    write_checkpoint(
        folder / "out",
        parts(export, tensors.items()),
        export.specs,
        source,
        quantization=export.config(),
    )
    return folder / "out"


@pytest.fixture(scope="module", params=list(SCALES))
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return write(tmp_path_factory.mktemp(request.param), WEIGHTS, request.param), request.param


def plain(weight: Tensor, scales: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    return plain_quant(weight.float().numpy(), 128, 128, 0.0, SCALES[scales])


def test_bytes_of_files_are_codes_and_scales_of_the_definition(written: tuple[Path, str]) -> None:
    folder, scales = written
    found = raw_header(folder / "model.safetensors")
    assert found.pop(NORM.name) == (
        "BF16",
        [5],
        torch.arange(5.0).bfloat16().view(torch.uint8).numpy().tobytes(),
    )
    for name, weight in WEIGHTS.items():
        codes, its_scales = plain(weight, scales)
        assert found.pop(name) == ("F8_E4M3", list(weight.shape), codes.tobytes())
        grid = [-(-n // 128) for n in weight.shape]
        assert found.pop(f"{name}_scale_inv") == ("F32", grid, its_scales.tobytes())
    assert not found
    header = raw_header(folder / "model.safetensors")
    assert [header[f"w{i}.weight_scale_inv"][1] for i in range(len(GRIDS))] == GRIDS


def test_config_json_says_what_is_in_codes(written: tuple[Path, str]) -> None:
    folder, scales = written
    config = json.loads((folder / "config.json").read_text())
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.head"],
    }
    if scales == "power_of_two":
        quantization["scale_fmt"] = "ue8m0"
    assert config == {"torch_dtype": "bfloat16", "kept": [1], "quantization_config": quantization}


def test_what_is_read_back_is_within_a_step_of_its_block(written: tuple[Path, str]) -> None:
    checkpoint = open_checkpoint(written[0])
    assert sorted(checkpoint.names()) == sorted([*WEIGHTS, NORM.name])
    for name, weight in WEIGHTS.items():
        found = checkpoint.get(name)
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        for part, expected in blocks(found, weight):
            worst = (part.double() - expected.double()).abs().max()
            assert worst <= 2.0**-4 * expected.abs().max(), name


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows, columns = tensors[0].shape
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            yield tuple(t[i : i + 128, j : j + 128] for t in tensors)


@pytest.mark.parametrize("scales", SCALES)
def test_blocks_of_zeros_have_scale_one_and_stay_zero(scales: str) -> None:
    for name, weight in ZEROS.items():
        codes, its_scales = fp8_weight(weight, scales)
        value = by_entry(codes.view(torch.uint8).numpy(), its_scales, BLOCK)
        zero = weight.float().numpy() == 0
        assert np.all(value[zero] == 0), name
        for i, j in np.ndindex(*its_scales.shape):
            at = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert (its_scales[i, j] == 1) == bool(zero[at].all()), (name, i, j)


@pytest.mark.parametrize("scales", SCALES)
def test_float32_and_bfloat16_of_one_value_have_one_code(scales: str) -> None:
    weight = values((130, 257), 3)
    for a, b in zip(fp8_weight(weight, scales), fp8_weight(weight.float(), scales), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def spoilt(shape: tuple[int, int], at: tuple[int, int], value: float) -> Tensor:
    weight = values(shape, 5)
    weight[at] = value
    return weight


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (spoilt((130, 257), (129, 256), float("inf")), r"inf at \[129, 256\]"),
        (spoilt((130, 257), (3, 5), -float("inf")), r"-inf at \[3, 5\]"),
        (spoilt((1, 300), (0, 299), float("nan")), r"nan at \[0, 299\]"),
        (spoilt((128, 128), (0, 0), float("inf")), r"inf at \[0, 0\]"),
        (torch.full((2, 200), 3.402e38), "overflow once scaled"),
        (torch.full((140, 3), float("nan")), r"420 value\(s\) that are not"),
    ],
)
@pytest.mark.parametrize("scales", SCALES)
def test_values_without_codes_are_refused_by_name_and_nothing_is_left(
    tmp_path: Path, scales: str, weight: Tensor, said: str
) -> None:
    weights = {**WEIGHTS, "spoilt.weight": weight}
    with pytest.raises(DataError, match=rf"^spoilt\.weight has no FP8 codes: .*{said}"):
        write(tmp_path, weights, scales)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("scales", SCALES)
def test_the_largest_bfloat16_can_be_written_or_is_refused_but_never_becomes_infinite(
    tmp_path: Path, scales: str
) -> None:
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.full((3, 130), largest, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    if scales == "f32":
        checkpoint = open_checkpoint(write(tmp_path, {"x.weight": weight}, scales))
        assert torch.equal(checkpoint.get("x.weight")[1:], weight[1:])
    else:
        with pytest.raises(DataError, match="overflow once scaled"):
            write(tmp_path, {"x.weight": weight}, scales)


def test_only_weights_that_are_announced_in_codes_are_touched() -> None:
    export = export_of({"a.weight": WEIGHTS["w0.weight"]}, "f32")
    norm, entry = torch.ones(5), Entry(2, torch.ones(4, 4))
    stream = [("norm.weight", norm), ("a.weight", WEIGHTS["w0.weight"]), ("stacked", entry)]
    found = list(parts(export, stream))
    assert [name for name, _ in found] == [
        "norm.weight",
        "a.weight",
        "a.weight_scale_inv",
        "stacked",
    ]
    assert found[0][1] is norm and found[3][1] is entry


@pytest.mark.parametrize("stops", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_stream_that_ends_early_leaves_nothing(
    tmp_path: Path, stops: type[BaseException]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    export = export_of(WEIGHTS, "f32")

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(WEIGHTS.items())[:3]
        raise stops()

    with pytest.raises(stops):
        write_checkpoint(
            tmp_path / "out",
            parts(export, stream()),
            export.specs,
            tmp_path,
            quantization=export.config(),
        )
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
