"""Everything there is that encodes and applies deltas, for their tests."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.ops import _native, delta_apply_ref_, delta_encode_ref_
from tests.ops.plain_delta import BITS

NATIVE = {"cpu"} <= _native.native_devices("delta_encode_") & _native.native_devices("delta_apply_")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")


def native_encode(base: Tensor, new: Tensor) -> Tensor:
    return torch.ops.megarl.delta_encode_(base, new)


def native_apply(base: Tensor, payload: Tensor) -> None:
    torch.ops.megarl.delta_apply_(base, payload)


def plain_apply(base: Tensor, payload: Tensor) -> None:
    """What servers without megarl have."""
    PLAIN.apply_delta(base, payload)


def _plain() -> Any:
    folder = (
        Path(__file__).parents[2] / "megarl" / "sync" / "sglang_plugin" / "megarl_sglang_plugin"
    )
    spec = importlib.util.spec_from_file_location("plain_delta", folder / "plain_delta.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = _plain()
Apply = Callable[[Tensor, Tensor], None]
encoders = pytest.mark.parametrize(
    "encode", [pytest.param(native_encode, marks=needs_native), delta_encode_ref_]
)
appliers = pytest.mark.parametrize(
    "apply", [pytest.param(native_apply, marks=needs_native), delta_apply_ref_, plain_apply]
)
kernel_and_reference = pytest.mark.parametrize(
    "apply", [pytest.param(native_apply, marks=needs_native), delta_apply_ref_]
)
HERE: list[Apply] = [*([native_apply] if NATIVE else []), delta_apply_ref_, plain_apply]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def payload_of(text: bytes) -> Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def changed(item: int, numel: int, changes: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Zeros, and zeros with these bit patterns at these places."""
    old = torch.zeros(numel, dtype=BITS[item])
    new = old.long()
    for place, pattern in changes.items():
        new[place] = pattern
    return old, new.to(old.dtype)
