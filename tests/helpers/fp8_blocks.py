"""FP8 in blocks by the definition of e4m3, for tests of what reads it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Values = NDArray[np.float64]
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def e4m3_table() -> Values:
    """[256] of the format's definition: 1 sign bit, 4 of exponent (bias 7), 3 of fraction."""
    values = []
    for code in range(256):
        sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
        size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        values.append((-1) ** sign * (np.nan if code & 127 == 127 else size))
    return np.array(values)


TABLE = e4m3_table()


def finite_codes(shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    codes[codes & 127 == 127] = 0
    return codes


def as_codes(codes: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def some_scales(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    sizes = np.exp(np.random.default_rng(seed).normal(-6, 2, shape)).astype(np.float32)
    return torch.from_numpy(sizes).to(dtype)


def by_entry(codes: NDArray[np.uint8], scales: Tensor, block: tuple[int, int]) -> NDArray[Any]:
    """f32 products, entry by entry."""
    rows, columns = (np.arange(n) // b for n, b in zip(codes.shape[-2:], block, strict=True))
    wide = scales.float().numpy()[..., rows[:, None], columns[None, :]]
    return TABLE[codes].astype(np.float32) * wide


def raw_header(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """(dtype's code, shape, bytes) of every tensor, by the format's definition."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header.pop("__metadata__")
    return {
        name: (e["dtype"], e["shape"], raw[end + e["data_offsets"][0] : end + e["data_offsets"][1]])
        for name, e in header.items()
    }


def quantised(source: Path, out: Path, block: tuple[int, int] = (16, 24)) -> tuple[Path, Tensors]:
    """The model with its projections in codes, in blocks; and the values they have."""
    folder = shutil.copytree(source, out)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if "proj" in name and name.endswith(".weight"):
            shape = tuple(tensors[name].shape)
            codes, scale = (
                finite_codes(shape, seed),
                some_scales(grid(shape, block), seed, torch.float32),
            )
            tensors |= {name: as_codes(codes), f"{name}_scale_inv": scale}
            values[name] = torch.from_numpy(by_entry(codes, scale, block))
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={**BLOCKS, "weight_block_size": list(block)})
    return folder, values


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def plain_values(folder: Path, out: Path) -> Path:
    """The model that a folder in FP8 stands for, in fp32."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    scales = {n.removesuffix("_scale_inv"): tensors.pop(n) for n in list(tensors) if "_inv" in n}
    for name, its_scales in scales.items():
        codes = tensors[name].view(torch.uint8).numpy()
        tensors[name] = torch.from_numpy(by_entry(codes, its_scales, (128, 128)))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
