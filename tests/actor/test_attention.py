"""Windows, sinks and segments of packed attention: values and gradients against the definition, in
float64.
"""

from itertools import pairwise

import pytest
import torch

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

HEADS, KV_HEADS, SIZE = 6, 2, 8
BOUNDS = (0, 4, 24, 28, 44, 60)  # two pairs of equal lengths, and one shorter than every window


def definition(
    inputs: dict[str, torch.Tensor], window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[T, HEADS * SIZE], one query, head and key at a time as the formula has them."""
    query, key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in inputs.values())
    out = []
    for start, end in pairwise(BOUNDS):
        for i in range(start, end):
            first = max(start, i - window + 1) if window else start
            scores = torch.einsum("hd,khd->hk", query[i], key[first : i + 1]) / SIZE**0.5
            weights = scores.exp()
            total = weights.sum(1) + (0 if sinks is None else sinks.exp())
            out.append(torch.einsum("hk,khd->hd", weights / total[:, None], value[first : i + 1]))
    return torch.stack(out).flatten(1)


@pytest.mark.parametrize("cp", [1, 2], ids="cp{}".format)
@pytest.mark.parametrize("window", [0, 1, 5, 8, 200])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_attention_is_its_definition(
    pool: WorkerPool, cp: int, window: int, with_sinks: bool
) -> None:
    draw = torch.Generator().manual_seed(window)
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    inputs = {n: 2 * torch.randn(BOUNDS[-1], h, SIZE, generator=draw) for n, h in heads.items()}
    sinks = torch.tensor([-20.0, -1.0, 0.0, 1.5, 4.0, 30.0]) if with_sinks else None
    upstream = torch.randn(BOUNDS[-1], HEADS * SIZE, generator=draw)

    results = pool.run(
        "tests.actor.work_attention:attend",
        world=cp,
        cp=cp,
        bounds=BOUNDS,
        inputs=inputs,
        window=window,
        sinks=sinks,
        upstream=upstream,
    )

    exact = {n: x.double().requires_grad_() for n, x in inputs.items()}
    exact_sinks = None if sinks is None else sinks.double().requires_grad_()
    expected = definition(exact, window, exact_sinks)
    expected.backward(upstream.double())
    wanted = {"out": expected.detach(), **{n: x.grad for n, x in exact.items()}}
    index = torch.cat([r["index"] for r in results])
    assert sorted(index.tolist()) == list(range(BOUNDS[-1]))
    for name, want in wanted.items():
        assert want is not None
        found = torch.cat([r[name] for r in results]).double()
        # scores up to about 20 in float32: 20 * 6e-8 relative in the weights, some steps of it
        torch.testing.assert_close(found, want[index], rtol=2e-5, atol=2e-5)
    if exact_sinks is not None:
        assert exact_sinks.grad is not None and (exact_sinks.grad[1:5].abs() > 1e-3).all()
        found = sum(r["sinks"].double() for r in results)
        torch.testing.assert_close(found, exact_sinks.grad, rtol=2e-5, atol=2e-5)
