"""What the tests of logprob_entropy share: random cases, and the definition in float64 numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.ops import _native, logprob_entropy, logprob_entropy_ref

NATIVE = "cpu" in _native.native_devices("logprob_entropy")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")
both = pytest.mark.parametrize(
    "op", [pytest.param(logprob_entropy, marks=needs_native), logprob_entropy_ref]
)
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF, NAN = float("inf"), float("nan")

Result = dict[str, np.ndarray]


def expected(
    logits: Tensor, targets: Tensor, g: Tensor, h: Tensor, vocab: int, temperature: float
) -> Result:
    """Straight from the definition, in float64."""
    z = logits.double().numpy()[:, :vocab] / temperature
    top = z.max(1, keepdims=True)
    e = np.exp(z - top)
    p = e / e.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        logp = z - top - np.log(e.sum(1, keepdims=True))
        plogp = np.where(p == 0, 0.0, p * logp)
    rows = np.arange(len(z))
    entropy = -plogp.sum(1)
    gv, hv = g.double().numpy()[:, None], h.double().numpy()[:, None]
    hot = np.zeros_like(z)
    hot[rows, targets.numpy()] = 1.0
    grad = np.zeros(tuple(logits.shape))
    grad[:, :vocab] = (gv * (hot - p) - hv * (plogp + p * entropy[:, None])) / temperature
    return {"lp": logp[rows, targets.numpy()], "entropy": entropy, "grad": grad}


def run(
    op: Any, logits: Tensor, targets: Tensor, g: Tensor | None, h: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    x = logits.clone().requires_grad_()
    lp, entropy = op(x, targets, **options)
    pairs = [(out, grad) for out, grad in ((lp, g), (entropy, h)) if grad is not None]
    torch.autograd.backward([o for o, _ in pairs], [v.to(o.dtype) for o, v in pairs])
    assert x.grad is not None
    return {"lp": lp.detach(), "entropy": entropy.detach(), "grad": x.grad}


def random_case(
    num_tokens: int, width: int, dtype: torch.dtype, seed: int = 0, scale: float = 4.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, targets, g, h)"""
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, width, generator=generator)).to(dtype)
    targets = torch.randint(0, width, (num_tokens,), generator=generator)
    g, h = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return logits, targets, g, h


def error(found: Tensor, truth: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - truth).max(initial=0.0))


def eager(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As trainers have it: everything in float32, the gradient by autograd."""
    logp = (logits.float() / temperature).log_softmax(-1)
    lp = logp.gather(1, targets[:, None]).squeeze(1)
    return lp, -(logp.exp() * logp).sum(-1)


def bits(x: Tensor) -> list[int]:
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(size).flatten().tolist()
