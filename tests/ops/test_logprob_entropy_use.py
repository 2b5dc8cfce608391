"""logprob_entropy in use: the logits as the gradient's buffer, columns apart, arguments refused."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.ops.logprob_entropy import backward_ref_, stats_ref
from tests.helpers.logprob_cases import (
    INF,
    NAN,
    bits,
    both,
    dtypes,
    error,
    expected,
    needs_native,
    random_case,
    run,
)

# --- the logits as the gradient's buffer ----------------------------------------------------------


def through_buffer(op: Any, logits: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """The gradient of a non-leaf [1, T, V], as a model's output is."""
    leaf = logits[None].clone().requires_grad_()
    buffer = leaf * 1.0
    seen: list[Tensor] = []
    buffer.register_hook(seen.append)
    lp, entropy = op(
        buffer.squeeze(0),
        targets,
        vocab_size=logits.shape[1] - 3,
        temperature=0.8,
        inplace_backward=True,
    )
    (lp @ g.to(lp.dtype) + entropy @ h.to(lp.dtype)).backward()
    assert seen[0].data_ptr() == buffer.data_ptr(), "the gradient lies elsewhere"
    assert leaf.grad is not None
    return leaf.grad[0]


@both
@dtypes
def test_in_place_the_gradient_is_the_same_and_takes_the_logits_place(op, dtype):
    logits, targets, g, h = random_case(5, 203, dtype)
    targets = targets % 200
    apart = run(op, logits, targets, g, h, vocab_size=200, temperature=0.8)["grad"]
    assert bits(through_buffer(op, logits, targets, g, h)) == bits(apart)


@both
def test_not_in_place_the_logits_stay(op):
    logits, targets, *_ = random_case(5, 40, torch.bfloat16)
    x = logits.clone().requires_grad_()
    lp, _ = op(x, targets, vocab_size=40, temperature=1.0)
    lp.sum().backward(retain_graph=True)
    once = x.grad.clone()
    lp.sum().backward()
    assert bits(x.detach()) == bits(logits)
    assert bits(x.grad) == bits(once * 2)


@both
def test_a_second_backward_through_overwritten_logits_is_refused(op):
    logits, targets, *_ = random_case(5, 40, torch.float32)
    x = logits.clone().requires_grad_() * 1.0
    lp, _ = op(x, targets, vocab_size=40, temperature=1.0, inplace_backward=True)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward through logits .* overwritten"):
        lp.sum().backward()


@both
def test_without_gradients_nothing_is_kept(op):
    logits, targets, *_ = random_case(5, 40, torch.float32)
    with torch.no_grad():
        lp, entropy = op(logits.requires_grad_(), targets, vocab_size=40, temperature=1.0)
    assert lp.grad_fn is None
    assert entropy.grad_fn is None
    lp, _ = op(logits.detach(), targets, vocab_size=40, temperature=1.0, inplace_backward=True)
    assert not lp.requires_grad


MEMORY = """
import re, torch
from megarl.ops import logprob_entropy
T, V = 256, 151_936
logits = torch.randn(T, V, dtype=torch.bfloat16, requires_grad=True)
targets = torch.randint(0, V, (T,))
def peak():  # not ru_maxrss, which a process inherits from the one that started it
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024
def step(x, y, inplace=True):
    lp, entropy = logprob_entropy(
        x, y, vocab_size=V, temperature=0.7, inplace_backward=inplace)
    torch.autograd.grad(lp.sum() + entropy.sum(), x)
small = torch.randn(8, 500).bfloat16().requires_grad_()
step(small, torch.randint(0, 500, (8,)))  # what is loaded at first use
for inplace in (True, False):
    before = peak()
    step(logits, targets, inplace)
    print((peak() - before) / (logits.numel() * 2))
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_beside_the_logits_is_less_than_a_hundredth_of_them():
    out = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True
    )
    beside, apart = map(float, out.stdout.split())
    assert beside <= 0.01
    assert apart >= 0.9  # a gradient of its own is seen: it is the logits' size


# --- tensor parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param((torch.ops.megarl, "native"), marks=needs_native, id="native"),
        pytest.param((None, "reference"), id="reference"),
    ],
)
@dtypes
@pytest.mark.parametrize("parts", [2, 4])
def test_columns_apart_put_together_are_the_row(ops, dtype, parts):
    """What ranks compute, all-reduced by hand (over a group: tests/actor/test_logprobs.py)."""
    stats_of = ops[0].logprob_entropy if ops[0] else stats_ref
    backward_ = ops[0].logprob_entropy_backward_ if ops[0] else backward_ref_
    width, vocab, temperature = 4096, 2500, 0.7  # of four parts the last has padding alone
    logits, targets, g, h = random_case(6, width, dtype)
    targets = targets % vocab
    truth = expected(logits, targets, g, h, vocab, temperature)
    each = width // parts
    pieces = [piece.contiguous() for piece in logits.chunk(parts, 1)]
    stats = [stats_of(x, targets, i * each, vocab, temperature) for i, x in enumerate(pieces)]
    shift = torch.stack([s[0] for s in stats]).amax(0)
    moved = [(s[0] - shift) / temperature for s in stats]
    total = sum(t.exp() * s[1] for t, s in zip(moved, stats, strict=True))
    weighted = sum(
        (t.exp() * (s[2] + t * s[1])).nan_to_num(0.0) for t, s in zip(moved, stats, strict=True)
    )
    target = sum(s[3] for s in stats)
    lp = (target - shift) / temperature - total.log()
    assert error(lp, truth["lp"]) <= 2e-6
    assert error(total.log() - weighted / total, truth["entropy"]) <= 2e-6
    softmax, grads = torch.stack([shift, total, weighted / total]), torch.stack([g, h])
    for i, x in enumerate(pieces):
        backward_(x, targets, softmax, grads, i * each, vocab, temperature)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    assert error(torch.cat(pieces, 1), truth["grad"]) <= tolerance


# --- errors carry what was found ------------------------------------------------------------------

ONES, ZEROS = torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)


@both
@pytest.mark.parametrize(
    ("logits", "targets", "vocab", "temperature", "message"),
    [
        (torch.ones(5), ZEROS, 5, 1.0, "logits must have 2 dimension.s., got 1"),
        (torch.ones(1, 2, 5), ZEROS, 5, 1.0, "logits must have 2 dimension.s., got 3"),
        (torch.ones(()), ZEROS, 5, 1.0, "logits must have 2 dimension.s., got 0"),
        (
            ONES.half(),
            ZEROS,
            5,
            1.0,
            "bfloat16(,| or) float32 or float64, got (Half|torch.float16)",
        ),
        (ONES.int(), ZEROS, 5, 1.0, "or float64, got (Int|torch.int32)"),
        (ONES.bool(), ZEROS, 5, 1.0, "or float64, got (Bool|torch.bool)"),
        (ONES, ZEROS.int(), 5, 1.0, "targets must be int64, got (Int|torch.int32)"),
        (ONES, ZEROS.float(), 5, 1.0, "targets must be int64, got (Float|torch.float32)"),
        (ONES, ZEROS.bool(), 5, 1.0, "targets must be int64, got (Bool|torch.bool)"),
        (ONES, ZEROS[:1], 5, 1.0, "targets must have 2 tokens like logits, got 1"),
        (ONES, ZEROS.repeat(2), 5, 1.0, "targets must have 2 tokens like logits, got 4"),
        (ONES, ZEROS[None], 5, 1.0, "targets must have 1 dimension.s., got 2"),
        (ONES, torch.tensor([0, 5]), 5, 1.0, r"in \[0, 5\), got 5 at token 1"),
        (ONES, torch.tensor([-1, 0]), 5, 1.0, r"in \[0, 5\), got -1 at token 0"),
        (ONES, torch.tensor([0, 4]), 4, 1.0, r"in \[0, 4\), got 4 at token 1"),
        (ONES, torch.tensor([0, 2**62]), 5, 1.0, r"in \[0, 5\), got 4611686018427387904"),
        (ONES, ZEROS, 0, 1.0, "vocab_size must be at least 1, got 0"),
        (ONES, ZEROS, -3, 1.0, "vocab_size must be at least 1, got -3"),
        (ONES, ZEROS, 5, 0.0, "temperature must be positive and finite, got 0"),
        (ONES, ZEROS, 5, -0.7, "temperature must be positive and finite, got -0.7"),
        (ONES, ZEROS, 5, INF, "temperature must be positive and finite, got inf"),
        (ONES, ZEROS, 5, NAN, "temperature must be positive and finite, got nan"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(
    op, logits, targets, vocab, temperature, message
):
    with pytest.raises(RuntimeError, match=message) as error:
        op(logits, targets, vocab_size=vocab, temperature=temperature)
    assert "logprob_entropy: " in str(error.value)


@pytest.mark.parametrize(
    "backward_",
    [
        pytest.param(lambda *a: torch.ops.megarl.logprob_entropy_backward_(*a), marks=needs_native),
        backward_ref_,
    ],
    ids=["native", "reference"],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax": torch.ones(2, 2).double()}, r"softmax must be \[3, 2\], got \[2, 2\]"),
        ({"softmax": torch.ones(3, 1).double()}, r"softmax must be \[3, 2\], got \[3, 1\]"),
        ({"softmax": torch.ones(3, 2)}, "softmax must be float64, got (Float|torch.float32)"),
        ({"grads": torch.ones(3, 2).double()}, r"grads must be \[2, 2\], got \[3, 2\]"),
        ({"grads": torch.ones(2).double()}, "grads must have 2 dimension.s., got 1"),
        ({"grads": torch.ones(2, 2)}, "grads must be float64, got (Float|torch.float32)"),
        ({"logits": torch.ones(1, 5).expand(2, 5)}, "overlap, got 5 columns at stride 0"),
        ({"logits": torch.ones(9).as_strided((2, 5), (4, 1))}, "overlap, got 5 columns at stride"),
        ({"logits": torch.ones(5, 2).t()}, "contiguous along the vocabulary, got stride 2"),
        ({"targets": torch.tensor([0, 7])}, r"in \[0, 5\), got 7 at token 1"),
        ({"first": -1}, "first_column must not be negative, got -1"),
    ],
)
def test_bad_arguments_of_backward_are_refused(backward_, change, message):
    given = {
        "logits": torch.ones(2, 5),
        "targets": ZEROS,
        "softmax": torch.ones(3, 2, dtype=torch.float64),
        "grads": torch.ones(2, 2, dtype=torch.float64),
        "first": 0,
    } | change
    with pytest.raises(RuntimeError, match=message) as error:
        backward_(*given.values(), 5, 1.0)
    assert "logprob_entropy_backward_: " in str(error.value)
