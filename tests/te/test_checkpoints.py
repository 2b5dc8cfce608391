"""Checkpoints between models of Megatron's own modules and of Transformer Engine's, both ways and
across layouts: weights, and what optimizers keep, bit for bit.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.helpers.dist import WorkerPool
from tests.helpers.export import export
from tests.te.test_models import LAYOUTS, assert_same_bits, fits, place, run, together

pytestmark = pytest.mark.dist

ELSEWHERE = {"pp": 2}
Kind = tuple[WorkerPool, dict[str, Any]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("to_te", [True, False], ids=["local to TE", "TE to local"])
def test_weights_move(
    local_pool: WorkerPool,
    te_pool: WorkerPool,
    families: dict[str, Path],
    tmp_path: Path,
    layout: dict[str, int],
    to_te: bool,
) -> None:
    """Read in the layout that wrote them, and in another."""
    for i, (name, hf) in enumerate(families.items()):
        if not fits(layout, name):
            continue
        path, here = tmp_path / str(i), place(layout, name)
        grouped = {"moe": {"grouped_gemm": i % 2 == 0}}  # of Transformer Engine's experts
        local: Kind = (local_pool, {})
        te: Kind = (te_pool, grouped)
        first, then = (local, te) if to_te else (te, local)
        _run(first, "saved", here, hf=hf, path=path)
        for there in (here, place(ELSEWHERE, name)):
            found = together(_run(then, "loaded", there, hf=hf, path=path))
            assert_same_bits(found, load_file(hf / "model.safetensors"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_are_converted_without_a_model(
    te_pool: WorkerPool, families: dict[str, Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    """What models of Transformer Engine's modules wrote is exported, what was imported is read by
    them: grouped experts and others.
    """
    for i, (name, hf) in enumerate(families.items()):
        if not fits(layout, name):
            continue
        there, spec = place(layout, name), read_spec(hf)
        kind: Kind = (te_pool, {"moe": {"grouped_gemm": i % 2 == 0}})
        written, imported, back = (tmp_path / f"{x}{i}" for x in ("written", "imported", "back"))
        expected = load_file(hf / "model.safetensors")
        _run(kind, "saved", there, hf=hf, path=written)
        export(written, back, spec, hf)
        assert_same_bits(load_file(back / "model.safetensors"), expected)
        imported.mkdir()
        write_weights(imported, open_checkpoint(hf), spec)
        assert_same_bits(together(_run(kind, "loaded", there, hf=hf, path=imported)), expected)


def _run(kind: Kind, what: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    pool, more = kind
    return run(pool, f"actions:{what}", layout, **arguments, **more)


BF16 = {"precision": {"dtype": "bf16"}}
SHARDED, WHOLE = ({"optim": {"lr": 1e-3, "distributed": d}} for d in (True, False))
WAYS = [  # layout that trains, settings of its optimizer, layout that the state passes through
    ({}, SHARDED, {"tp": 2}),
    ({}, SHARDED, {"dp": 2, "ep": 2}),
    ({}, SHARDED, {"pp": 2}),
    ({}, SHARDED, {"tp": 2, "ep": 2, "etp": 1}),
    ({"dp": 2, "ep": 2}, SHARDED, {}),
    ({}, WHOLE, {}),
]


@pytest.mark.parametrize("name", ["qwen3_moe tied", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("layout, optim, through", WAYS, ids=str)
def test_training_goes_on_as_if_its_state_had_not_passed_through_fused_adam(
    local_pool: WorkerPool,
    te_pool: WorkerPool,
    families: dict[str, Path],
    tmp_path: Path,
    name: str,
    layout: dict[str, int],
    optim: dict[str, Any],
    through: dict[str, int],
) -> None:
    """Torch's AdamW on local layers saves after two steps; a model of Transformer Engine's modules
    with its FusedAdam reads that and writes it again; AdamW goes on from there.
    """
    hf, saved, again = families[name], tmp_path / "saved", tmp_path / "again"
    settings = {"hf": hf, **BF16, **optim}
    until = {"save_at": 2, "until": 4}
    train = "tests.actor.work_state:trained_on"
    there, world = place(layout, name), 2 if layout else 1
    straight = local_pool.run(train, world=world, layout=there, path=saved, **until, **settings)
    train_te = {"train": {"transformer_impl": "transformer_engine", "row_tokens": 96}}
    moe = {"moe": {"grouped_gemm": True}}
    passage = {"path": saved, "out": again, **settings, **train_te, **moe}
    kept = run(te_pool, "actions:passed_through_fused_adam", place(through, name), **passage)
    for of_rank in kept:
        assert of_rank["optimizers"] == [
            "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
        ]
        assert of_rank["steps"] and all(type(s) is int and s == 2 for s in of_rank["steps"])
        assert of_rank["moments"] == {"exp_avg", "exp_avg_sq"}
    resume = "tests.actor.work_state:resumed"
    rest = local_pool.run(resume, world=world, layout=there, path=again, **until, **settings)
    for part in ("before", "after"):
        assert_same_bits(together([r[part] for r in rest]), together([r[part] for r in straight]))
