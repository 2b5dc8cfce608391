"""Every family's log-probs and gradients are transformers', in every layout.

One table: ``helpers/families.MODELS`` x ``LAYOUTS``. By default one rank and a few layouts of two;
marked slow, all of it, which prints the parity table (the largest differences) and writes it where
``MEGARL_PARITY_TABLE`` says.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import (
    MODELS,
    WITHOUT_EXPERTS,
    reference_gradients,
    reference_logprobs,
    save_model,
)
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

LOGPROB_TOL = 1e-5  # fp32 sums in another order; a wrong term is of order 1e-2 or more
GRADIENT_TOL = 2e-5  # of the tensor's largest entry, as in test_layouts.py
PACKED, APART = 96, 24  # tokens of a row: several samples, or one

FEW = [{"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}]
LAYOUTS = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "first_layers": 1},
    {"dp": 2, "ep": 2},
    {"cp": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
    {"cp": 2, "dp": 2, "ep": 2},
]
WHOLE_EXPERTS = {name for name, (family, _) in MODELS.items() if family == "gpt_oss"}  # etp is 1
SAMPLES = random_samples(4, 3, seed=3)
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: save_model(name, folder / name.replace(" ", "_")) for name in MODELS}


@pytest.fixture(scope="session")
def expected(models: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {name: reference_logprobs(folder, SAMPLES) for name, folder in models.items()}


@pytest.fixture(scope="session")
def single(pool: WorkerPool, models: dict[str, Path]) -> Results:
    return evaluate(pool, models, {}, SAMPLES)


@pytest.fixture(scope="module")
def large_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


def evaluate(
    pool: WorkerPool,
    models: dict[str, Path],
    layout: dict[str, int],
    samples: list[Sample],
    row_tokens: int = PACKED,
    with_gradients: bool = True,
) -> Results:
    models = {
        n: m for n, m in models.items() if layout.get("ep", 1) == 1 or n not in WITHOUT_EXPERTS
    }
    layouts = {n: {**layout, "etp": 1} if n in WHOLE_EXPERTS else layout for n in models}
    ranks = pool.run(
        "tests.actor.work_families:evaluate",
        world=mesh_of(layout).world_size,
        timeout_s=300,
        models=models,
        layouts=layouts,
        samples=samples,
        row_tokens=row_tokens,
        with_gradients=with_gradients,
    )
    return {
        name: {
            part: {k: v for r in ranks for k, v in r[name][part].items()}
            for part in ("logprobs", "gradients")
        }
        for name in models
    }


def logprob_difference(found: dict[int, torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert sorted(found) == list(range(len(expected)))
    return max(float((found[i].double() - e).abs().max()) for i, e in enumerate(expected))


def gradient_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest, as a share of the tensor's largest entry, and where."""
    assert found.keys() == expected.keys()
    return max(
        (float((found[name] - g).abs().max() / g.abs().max()), name) for name, g in expected.items()
    )


def assert_same(found: Results, expected: dict[str, list[torch.Tensor]], single: Results) -> None:
    for name, results in found.items():
        assert logprob_difference(results["logprobs"], expected[name]) < LOGPROB_TOL, name
        error, tensor = gradient_difference(results["gradients"], single[name]["gradients"])
        assert error < GRADIENT_TOL, (name, tensor, error)


def test_log_probs_equal_transformers(
    single: Results, expected: dict[str, list[torch.Tensor]]
) -> None:
    for name, results in single.items():
        assert torch.cat(expected[name]).std() > 0.1, name  # not uniform, where any would agree
        assert logprob_difference(results["logprobs"], expected[name]) < LOGPROB_TOL, name


def test_gradients_equal_transformers(single: Results, models: dict[str, Path]) -> None:
    for name, results in single.items():
        expected = reference_gradients(models[name], SAMPLES)
        error, tensor = gradient_difference(without_copies(results["gradients"]), expected)
        assert error < GRADIENT_TOL, (name, tensor, error)


def without_copies(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of embedding and head, for multi-token prediction."""
    behind = ("model.layers.4.", "model.layers.5.")
    return {n: g for n, g in gradients.items() if not n.startswith(behind)}


def test_log_probs_of_samples_apart_equal_transformers(
    pool: WorkerPool, models: dict[str, Path], expected: dict[str, list[torch.Tensor]]
) -> None:
    found = evaluate(pool, models, {}, SAMPLES, APART, with_gradients=False)
    for name, results in found.items():
        assert logprob_difference(results["logprobs"], expected[name]) < LOGPROB_TOL, name


@pytest.mark.parametrize("layout", FEW, ids=str)
def test_a_layout_computes_the_same(
    pool: WorkerPool,
    models: dict[str, Path],
    expected: dict[str, list[torch.Tensor]],
    single: Results,
    layout: dict[str, int],
) -> None:
    assert_same(evaluate(pool, models, layout, SAMPLES), expected, single)


@pytest.mark.slow
def test_every_family_in_every_layout(
    pool: WorkerPool,
    large_pool: WorkerPool,
    models: dict[str, Path],
    expected: dict[str, list[torch.Tensor]],
    single: Results,
) -> None:
    """The parity table, against transformers."""
    gradients = {name: reference_gradients(model, SAMPLES) for name, model in models.items()}
    table: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in MODELS}
    for layout in LAYOUTS:
        found = evaluate(large_pool, models, layout, SAMPLES) if layout else single
        for name, results in found.items():
            own = without_copies(results["gradients"])
            error, _ = gradient_difference(own, gradients[name])
            difference = logprob_difference(results["logprobs"], expected[name])
            table[name][label(layout)] = difference, error
    text = as_text(table)
    print(text)
    if path := os.environ.get("MEGARL_PARITY_TABLE"):
        Path(path).write_text(text)
    cells = [cell for row in table.values() for cell in row.values()]
    assert all(lp < LOGPROB_TOL and grad < GRADIENT_TOL for lp, grad in cells), text


def label(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items()) or "1 rank"


def as_text(table: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Markdown; a cell is the largest difference of log-probs, then of gradients."""
    columns = [label(layout) for layout in LAYOUTS]
    lines = [["model", *columns], ["---"] * (len(columns) + 1)]
    for name, row in table.items():
        cells = [f"{row[c][0]:.0e} / {row[c][1]:.0e}" if c in row else "" for c in columns]
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_a_token_of_one_sequence_changes_no_bit_of_the_others(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of models whose every expert sees every token: sums over other counts may round otherwise."""
    everywhere = {name: with_all_experts(m, tmp_path / name) for name, m in models.items()}
    victim = 5
    changed = list(SAMPLES)
    tokens = changed[victim].tokens.copy()
    tokens[1] = tokens[1] % 23 + 1
    changed[victim] = dataclasses.replace(changed[victim], tokens=tokens)
    before, after = (
        evaluate(pool, everywhere, {}, samples, with_gradients=False)
        for samples in (SAMPLES, changed)
    )
    for name in everywhere:
        old, new = before[name]["logprobs"], after[name]["logprobs"]
        assert (old[victim] - new[victim]).abs().max() > 1e-2, name
        for i in set(old) - {victim}:
            assert torch.equal(old[i], new[i]), (name, i)


def with_all_experts(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((config[key] for key in keys if config.get(key)), 0)
    if experts:
        config["num_experts_per_tok"] = experts
    if config.get("n_group"):
        config["n_group"] = config["topk_group"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder
