"""Log-prob and entropy of the sampled tokens from vocabulary-parallel logits.

Shapes: T tokens; V the vocabulary, of which a tensor-parallel rank holds W columns from
``first_column`` on, padding included (columns at or beyond ``vocab_size`` have p = 0 and are never
read). With z the logits over temperature and p = softmax(z)::

    lp_t = z_y - lse(z)          H_t = lse(z) - sum_v p_v z_v
    d(g lp + h H)/dz_v = (1/temperature) [ g (1[v = y] - p_v) - h p_v (log p_v + H) ]

1. Two operators, one before and one after the all-reduces, both on this rank's columns alone::

       logprob_entropy(logits, targets, ...) -> stats f64 [4, T]
           shift;  sum = sum_v e^t;  weighted = sum_v t e^t;  x_y, or 0 if not here
           where t = (x_v - shift) / temperature
       logprob_entropy_backward_(logits!, targets, softmax f64 [3, T], grads f64 [2, T], ...)
           softmax: shift, sum and mean = weighted / sum over all columns;  grads: g, h
           the gradient takes the logits' place

   The shift is the row's largest logit or another little below it (in the kernels no t is above
   1.5 ln 2), and -infinity where there is no finite one; no result depends on which. Between the
   two one max and one sum all-reduce, of 1 and 3 numbers a token; backward has none.
2. Logits are read in their own precision, bf16, f32 or f64; there is no copy of them in another.
   Elements are computed in f32 (f64 for f64 logits), sums added and combined in f64.
3. Memory: 56 bytes a token beside the logits where backward may overwrite them.
4. A token whose two gradients are 0 gets exact zeros, also where its logits are NaN; so do padding
   columns and logits of -infinity. A row with NaN has NaN results.

Source: docs/objectives.md, "Entropy, log-prob backward".
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.ops._arguments import check_device, check_dim, check_type
from megarl.ops._native import count_call, native_devices, runs_native
from megarl.ops._selfcheck import self_check

OP, BACKWARD = "logprob_entropy", "logprob_entropy_backward_"


class Columns(NamedTuple):
    """Of the vocabulary, those that this rank's logits have."""

    first_column: int
    vocab_size: int
    temperature: float


class Operators(NamedTuple):
    """The two halves of item 1: kernels, or the references."""

    stats: Callable[..., Tensor]
    backward_: Callable[..., None]


def logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs f32 [T], entropy f32 [T], nats) of ``targets`` i64 [T] under ``logits``
    bf16|f32|f64 [T, W]; f64 for f64 logits. Differentiable in the logits, once.

    Collective over ``group`` (the tensor-parallel group, rank r with columns r W to (r + 1) W;
    None: all columns are here). ``inplace_backward``: the caller gives the logits away, and their
    gradient is written over them; else it is a tensor of its own.

    RuntimeError for a target outside of [0, vocab_size), a temperature that is not positive, and a
    second backward through logits that the first has overwritten.
    """
    native = runs_native(OP, logits.device)
    ops = torch.ops.megarl
    chosen = Operators(ops.logprob_entropy, ops.logprob_entropy_backward_) if native else REFERENCE
    return _apply(logits, targets, chosen, vocab_size, temperature, group, inplace_backward)


def logprob_entropy_ref(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """The specification of ``logprob_entropy``, in plain torch."""
    return _apply(logits, targets, REFERENCE, vocab_size, temperature, group, inplace_backward)


def _apply(
    logits: Tensor,
    targets: Tensor,
    ops: Operators,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    check_dim(OP, "logits", logits, 2)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    first_column = logits.shape[1] * group.rank() if group is not None else 0
    columns = Columns(first_column, vocab_size, temperature)
    logprobs, entropy = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, ops, columns, group, inplace_backward
    )
    return logprobs, entropy


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ops: Operators,
        columns: Columns,
        group: dist.ProcessGroup | None,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        stats = ops.stats(logits, targets, *columns)
        if group is not None:
            stats = combined(stats, columns.temperature, group)
        shift, total, weighted, target = stats
        log_sum, mean = total.log(), weighted / total
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, targets, torch.stack([shift, total, mean]))
            ctx.ops, ctx.columns = ops, columns
            ctx.inplace, ctx.overwritten = inplace_backward, False
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = (target - shift) / columns.temperature - log_sum
        return logprobs.to(dtype), (log_sum - mean).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                f"{OP}: a second backward through logits that the first has overwritten with "
                "their gradient (inplace_backward=True)"
            )
        logits, targets, softmax = ctx.saved_tensors
        of_tokens = softmax.new_zeros(2, len(targets))
        for row, grad in zip(of_tokens, grads, strict=True):
            if grad is not None:
                row.copy_(grad)
        ctx.overwritten = ctx.inplace
        contiguous = torch.contiguous_format
        buffer = logits.detach() if ctx.inplace else logits.clone(memory_format=contiguous)
        count_call(BACKWARD, ctx.ops is not REFERENCE)
        ctx.ops.backward_(buffer, targets, softmax, of_tokens, *ctx.columns)
        return buffer, None, None, None, None, None


def combined(stats: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """Stats [4, T] of all columns from each rank's own. Collective over ``group``."""
    shift, total, weighted, target = stats
    highest = shift.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    t = (shift - highest) / temperature
    scale = t.exp()
    # A rank with padding columns alone has t = -infinity and nothing to add.
    moved = torch.where(scale > 0, scale * (weighted + t * total), 0.0)
    sums = torch.stack([scale * total, moved, target])
    dist.all_reduce(sums, group=group)
    return torch.cat([highest[None], sums])


# --- the references -------------------------------------------------------------------------------


def stats_ref(
    logits: Tensor, targets: Tensor, first_column: int, vocab_size: int, temperature: float
) -> Tensor:
    """The specification of ``megarl::logprob_entropy``: f64 [4, T]."""
    columns = Columns(first_column, vocab_size, temperature)
    _check(OP, logits, targets, columns)
    _check_targets(OP, targets, vocab_size)
    width = _width(logits, columns)
    stats = logits.new_empty(4, len(logits), dtype=torch.float64)
    for rows in _chunks(logits):
        x = logits[rows, :width].to(_real(logits))
        low = x.new_full((len(x), 1), float("-inf"))
        top = torch.cat([x.nan_to_num(float("-inf"), float("inf"), float("-inf")), low], 1).amax(1)
        t = (x - top.masked_fill(top == float("-inf"), 0.0)[:, None]) / temperature
        e = t.exp()
        stats[0, rows] = top.double()
        stats[1, rows] = e.sum(1, dtype=torch.float64)
        stats[2, rows] = torch.where(e == 0, 0.0, e * t).sum(1, dtype=torch.float64)
        here, at = _here(targets[rows], first_column, width)
        stats[3, rows] = 0.0
        stats[3, rows][here] = x[here, at].double()
    return stats


def backward_ref_(
    logits: Tensor,
    targets: Tensor,
    softmax: Tensor,
    grads: Tensor,
    first_column: int,
    vocab_size: int,
    temperature: float,
) -> None:
    """The specification of ``megarl::logprob_entropy_backward_``."""
    columns = Columns(first_column, vocab_size, temperature)
    _check(BACKWARD, logits, targets, columns)
    _check_backward(logits, softmax, grads)
    _check_targets(BACKWARD, targets, vocab_size)
    width = _width(logits, columns)
    for rows in _chunks(logits):
        x = logits[rows, :width].to(_real(logits))
        shift, total, mean = softmax[:, rows].to(x.dtype)[:, :, None]
        g, h = grads[:, rows].to(x.dtype)[:, :, None]
        t = (x - shift) / temperature
        p = t.exp() / total
        grad = torch.where(p == 0, 0.0, p * (t - mean)).mul_(-h).sub_(p * g)
        here, at = _here(targets[rows], first_column, width)
        grad[here, at] += g[here, 0]
        grad.masked_fill_((g == 0) & (h == 0), 0.0)
        logits[rows, :width] = (grad / temperature).to(logits.dtype)
        logits[rows, width:] = 0.0


REFERENCE = Operators(stats_ref, backward_ref_)


def _real(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _width(logits: Tensor, columns: Columns) -> int:
    """How many columns here are the vocabulary's."""
    return max(0, min(logits.shape[1], columns.vocab_size - columns.first_column))


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows that are computed together: about a megabyte in f32."""
    rows = max(1, 2**18 // max(1, logits.shape[1]))
    return (slice(i, min(i + rows, len(logits))) for i in range(0, len(logits), rows))


def _here(targets: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    """(rows whose target is in this rank's columns, the column of each)."""
    at = targets - first_column
    here = ((at >= 0) & (at < width)).nonzero().squeeze(1)
    return here, at[here]


# --- checks, in the kernels' words (csrc/common.h) ------------------------------------------------


def _check(op: str, logits: Tensor, targets: Tensor, columns: Columns) -> None:
    check_dim(op, "logits", logits, 2)
    check_type(op, "logits", logits, torch.bfloat16, torch.float32, torch.float64)
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise RuntimeError(
            f"{op}: logits must be contiguous along the vocabulary, got stride {logits.stride(1)}"
        )
    check_dim(op, "targets", targets, 1)
    check_type(op, "targets", targets, torch.int64)
    if targets.shape[0] != logits.shape[0]:
        raise RuntimeError(
            f"{op}: targets must have {logits.shape[0]} tokens like logits, got {targets.shape[0]}"
        )
    check_device(op, "targets", targets, logits)
    first_column, vocab_size, temperature = columns
    if first_column < 0:
        raise RuntimeError(f"{op}: first_column must not be negative, got {first_column}")
    if vocab_size < 1:
        raise RuntimeError(f"{op}: vocab_size must be at least 1, got {vocab_size}")
    if not 0 < temperature < 1e30:
        raise RuntimeError(f"{op}: temperature must be positive and finite, got {temperature}")


def _check_backward(logits: Tensor, softmax: Tensor, grads: Tensor) -> None:
    for name, x, rows in (("softmax", softmax, 3), ("grads", grads, 2)):
        check_dim(BACKWARD, name, x, 2)
        check_type(BACKWARD, name, x, torch.float64)
        if tuple(x.shape) != (rows, logits.shape[0]):
            raise RuntimeError(
                f"{BACKWARD}: {name} must be [{rows}, {logits.shape[0]}], got {list(x.shape)}"
            )
        check_device(BACKWARD, name, x, logits)
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise RuntimeError(
            f"{BACKWARD}: rows of logits must not overlap, got {logits.shape[1]} columns at "
            f"stride {logits.stride(0)}"
        )


def _check_targets(op: str, targets: Tensor, vocab_size: int) -> None:
    """Reads them, for which an accelerator must stop: only the references pay that."""
    bad = ((targets < 0) | (targets >= vocab_size)).nonzero()
    if len(bad):
        token = int(bad[0])
        raise RuntimeError(
            f"{op}: targets must be in [0, {vocab_size}), got {int(targets[token])} "
            f"at token {token}"
        )


# --- registration ---------------------------------------------------------------------------------


def _fake(
    logits: Tensor, targets: Tensor, first_column: int, vocab_size: int, temperature: float
) -> Tensor:
    _check(OP, logits, targets, Columns(first_column, vocab_size, temperature))
    return logits.new_empty(4, logits.shape[0], dtype=torch.float64)


def _fake_backward_(
    logits: Tensor, targets: Tensor, softmax: Tensor, grads: Tensor, *columns: Any
) -> None:
    _check(BACKWARD, logits, targets, Columns(*columns))
    _check_backward(logits, softmax, grads)


if native_devices(OP):
    torch.library.register_fake(f"megarl::{OP}", _fake)
    torch.library.register_fake(f"megarl::{BACKWARD}", _fake_backward_)


def _without_shift(stats: Tensor, temperature: float) -> Tensor:
    """[3, T], the same for every choice of shift: lse, sum_v p_v z_v, and the target's logit."""
    z = stats[0] / temperature
    return torch.stack([z + stats[1].log(), z + stats[2] / stats[1], stats[3]])


@self_check(OP)
def _check_kernels(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    ops = torch.ops.megarl
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = (4 * torch.randn(7, 3001, generator=generator)).to(dtype)
        targets = torch.randint(500, 3100, (7,), generator=generator)  # some in no column here
        columns = Columns(400, 3200, 0.7)  # and columns 2800 on are padding
        expected = stats_ref(logits, targets, *columns)
        found = ops.logprob_entropy(logits.to(device), targets.to(device), *columns)
        torch.testing.assert_close(
            _without_shift(found.cpu(), 0.7), _without_shift(expected, 0.7), rtol=1e-6, atol=2e-6
        )
        softmax = torch.stack([expected[0], expected[1], expected[2] / expected[1]])
        grads = torch.randn(2, 7, generator=generator, dtype=torch.float64)
        given = [x.to(device) for x in (logits, targets, softmax, grads)]
        ops.logprob_entropy_backward_(*given, *columns)
        backward_ref_(logits, targets, softmax, grads, *columns)
        rtol = 2**-7 if dtype == torch.bfloat16 else 1e-4  # bf16: one step of it
        torch.testing.assert_close(given[0].cpu(), logits, rtol=rtol, atol=1e-6)
