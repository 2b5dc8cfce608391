"""Log-prob and entropy, forward and backward, of a whole vocabulary on one rank.

``vs_padded``: the eager float32 that trainers run, log_softmax, gather and entropy with autograd;
its rows are these very tokens. ``vs_reference``: our reference, chunked torch. Bytes that must be
touched: each logit read forward, read and written backward, against a copy of as many.

Peak memory beside the logits: ``memory()``, in a process of its own.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megarl.ops import logprob_entropy, logprob_entropy_ref
from opsbench.measure import Call, Row, best_times, copy_call, threads

VOCAB, TEMPERATURE = 151_936, 0.7
CASES = (
    ("bf16", torch.bfloat16, True),
    ("bf16 no entropy grad", torch.bfloat16, False),
    ("f32", torch.float32, True),
)


def eager(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (logits.float() / TEMPERATURE).log_softmax(-1)
    lp = logp.gather(1, targets[:, None]).squeeze(1)
    return lp, -(logp.exp() * logp).sum(-1)


def compiled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logprob_entropy(
        logits,
        targets,
        vocab_size=logits.shape[1],
        temperature=TEMPERATURE,
        inplace_backward=True,
    )


def reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logprob_entropy_ref(
        logits,
        targets,
        vocab_size=logits.shape[1],
        temperature=TEMPERATURE,
        inplace_backward=True,
    )


Op = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def step(op: Op, logits: Tensor, targets: Tensor, *, entropy_grad: bool) -> Callable[[], None]:
    """Forward and backward."""
    leaf = logits.detach().requires_grad_()

    def call() -> None:
        lp, entropy = op(leaf, targets)
        loss = lp.sum() + entropy.sum() if entropy_grad else lp.sum()
        torch.autograd.grad(loss, leaf)

    return call


def timed(logits: Tensor, targets: Tensor, *, entropy_grad: bool, rounds: int) -> dict[str, float]:
    """Seconds of each alternative. Logits that the compiled step and the reference overwrite are
    restored before each call, outside of its time.
    """
    num_bytes = logits.numel() * logits.element_size()
    buffer = logits.clone()
    calls: dict[str, Call] = {}
    for name, op in (("compiled", compiled), ("reference", reference)):
        calls[f"restore for {name}"] = partial(buffer.copy_, logits)
        calls[name] = step(op, buffer, targets, entropy_grad=entropy_grad)
    calls["eager"] = step(eager, logits, targets, entropy_grad=entropy_grad)
    calls["copy"] = copy_call(3 * num_bytes)
    return best_times(calls, rounds)


def rows(quick: bool) -> Iterator[Row]:
    num_tokens, vocab = (16, 5000) if quick else (1024, VOCAB)
    for count, (case, dtype, entropy_grad) in product((1, 2), CASES):
        generator = torch.Generator().manual_seed(0)
        logits = (3 * torch.randn(num_tokens, vocab, generator=generator)).to(dtype)
        targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
        with threads(count):
            best = timed(logits, targets, entropy_grad=entropy_grad, rounds=2 if quick else 9)
        yield Row(
            op="logprob_entropy",
            case=case,
            tokens=num_tokens,
            threads=count,
            vs_padded=best["eager"] / best["compiled"],
            vs_reference=best["reference"] / best["compiled"],
            copy_bandwidth_fraction=best["copy"] / best["compiled"],
            seconds=best["compiled"],
            note=f"eager {best['eager']:.3g} s, copy {best['copy']:.3g} s",
        )


def memory(num_tokens: int = 256, vocab: int = VOCAB) -> float:
    """Growth of this process's peak memory over a step, as a share of the bf16 logits. What the
    peak was before hides a smaller one: run it first.
    """

    def peak() -> int:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None, "Linux only"
        return int(found[1]) * 1024

    few = torch.zeros(8, 500, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    step(compiled, *few, entropy_grad=True)()  # what is loaded at first use
    logits = torch.zeros(num_tokens, vocab, dtype=torch.bfloat16).add_(1)
    run = step(compiled, logits, torch.zeros(num_tokens, dtype=torch.int64), entropy_grad=True)
    before = peak()
    run()
    return (peak() - before) / (logits.numel() * 2)
