"""The experts' load-balancing loss and the router's z-loss against transformers' router and the
formulas of docs/objectives.md, with their scale, in every layout. Nothing else is trained, so what
is left is it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.packing import plan_rows
from megarl.models.flops import pass_flops
from megarl.models.spec import read_spec
from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.actor.split_cases import masked
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

COEF = 0.125
SAMPLES = [masked(s, keep=0) for s in random_samples(3, 4, seed=3)]


def balance(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Switch Transformer's loss of router logits [tokens, experts]."""
    probs = logits.softmax(-1)
    tokens, experts = probs.shape
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(topk).indices, 1.0)
    share = chosen.sum(0) / (tokens * topk)
    return experts * (share * probs.mean(0)).sum()


def z_loss(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """ST-MoE's, arXiv 2202.08906: equation 5."""
    return logits.logsumexp(-1).square().mean()


LOSSES = {"aux_loss_coeff": balance, "z_loss_coeff": z_loss}


def expected(
    hf: Path, rows: list[list[int]], kind: str = "aux_loss_coeff"
) -> dict[str, torch.Tensor]:
    """Gradients of the mean over ``rows`` of the loss of each, by transformers and autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        if not row:
            continue
        outputs = [
            model(torch.from_numpy(SAMPLES[i].tokens).long()[None], output_router_logits=True)
            for i in row
        ]
        for layer in zip(*(o.router_logits for o in outputs), strict=True):
            topk = model.config.num_experts_per_tok
            total = total + COEF * LOSSES[kind](torch.cat(layer).float(), topk)
    (total / len(rows)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def found(
    pool: WorkerPool,
    hf: Path,
    layout: dict[str, int],
    row_tokens: int,
    kind: str = "aux_loss_coeff",
    samples: list[Sample] = SAMPLES,
) -> dict[str, Any]:
    results = pool.run(
        "tests.actor.work_aux_loss:gradients_of",
        world=mesh_of(layout).world_size,
        **{"hf": hf, "layout": layout, "samples": samples},
        **{"row_tokens": row_tokens, "moe": {kind: COEF}},
    )
    return {n: g for part in results for n, g in part.items()}


LAYOUTS = [{"dp": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}]
FOUR_RANKS = [{"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 2, "cp": 2}]


@pytest.mark.parametrize(
    ("layout", "row_tokens"),
    [
        ({}, 300),
        *((layout, 60) for layout in [{}, *LAYOUTS]),
        *(pytest.param(layout, 60, marks=pytest.mark.slow) for layout in FOUR_RANKS),
    ],
    ids=str,
)
def test_it_is_the_mean_over_rows_of_the_formula(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], row_tokens: int
) -> None:
    reference = expected(tiny_model, packed(tiny_model, layout, row_tokens))
    assert_gradients(found(pool, tiny_model, layout, row_tokens), reference)


SOME = [{}, {"cp": 2}, {"tp": 2}]
REST = [*(x for x in LAYOUTS if x not in SOME), *FOUR_RANKS]


@pytest.mark.parametrize(
    "layout", [*SOME, *(pytest.param(x, marks=pytest.mark.slow) for x in REST)], ids=str
)
def test_the_z_loss_likewise(pool: WorkerPool, tiny_model: Path, layout: dict[str, int]) -> None:
    """Also where ranks share a row and have unlike numbers of its true tokens."""
    reference = expected(tiny_model, packed(tiny_model, layout, 60), "z_loss_coeff")
    assert_gradients(found(pool, tiny_model, layout, 60, "z_loss_coeff"), reference)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ({"dp": 2}, [[0], []]),
        pytest.param({"pp": 2, "vpp": 2}, [[0], []], marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2}, [[0], []], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_row_without_a_token_adds_nothing(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], rows: list[list[int]], kind: str
) -> None:
    """It counts in the mean; what is 0 / 0 in it must not reach the others."""
    reference = expected(tiny_model, rows, kind)
    one = found(pool, tiny_model, layout, 60, kind, samples=SAMPLES[:1])
    assert_gradients(one, reference)


def packed(hf: Path, layout: dict[str, int], row_tokens: int) -> list[list[int]]:
    mesh = mesh_of(layout)
    plan = plan_rows(
        [len(s.tokens) for s in SAMPLES],
        row_tokens=row_tokens,
        dp=mesh.dp,
        segment_multiple=mesh.segment_multiple,
        row_multiple=mesh.row_multiple,
        rows_multiple=mesh.rows_multiple,
        flops=pass_flops(read_spec(hf)),
    )
    rows = [row for rank in plan.rows for row in rank]
    assert len(rows) >= mesh.dp * mesh.rows_multiple and all(rows)
    return rows


def assert_gradients(gradients: dict[str, Any], reference: dict[str, torch.Tensor]) -> None:
    seen = 0
    for name, g in gradients.items():
        if ".experts." in name:  # transformers keeps all experts of a layer in one tensor
            continue
        wanted = reference.get(name, torch.zeros_like(g))
        size = float(wanted.abs().max())
        # fp32 through four layers on both sides, in another order of sums
        assert (g - wanted).abs().max() <= 1e-4 * size + 1e-8, (name, size)
        seen += name.endswith("mlp.gate.weight") and size > 1e-4
    assert seen == 4  # the routers of all layers


def test_without_a_coefficient_there_is_none(pool: WorkerPool, tiny_model: Path) -> None:
    work = {
        "hf": tiny_model,
        "layout": {},
        "samples": SAMPLES,
        "row_tokens": 300,
        "moe": {"aux_loss_coeff": 0.0},
    }
    (gradients,) = pool.run("tests.actor.work_aux_loss:gradients_of", world=1, **work)
    assert all((g == 0).all() for g in gradients.values())


def test_the_fused_loss_would_get_the_integers_that_it_demands(
    pool: WorkerPool, tiny_model: Path
) -> None:
    """Transformer Engine's kernel refuses tokens that are not an int64, on a GPU alone."""
    samples = random_samples(2, 2, seed=5)
    (seen,) = pool.run(
        "tests.actor.work_routers:balancing_inputs", world=1, hf=tiny_model, samples=samples
    )
    assert seen and {(kind, loads) for kind, _, loads, _ in seen} == {("torch.int64",) * 2}
    assert all(chosen == 2 * tokens for _, tokens, _, chosen in seen)
