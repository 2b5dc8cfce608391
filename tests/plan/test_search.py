"""Suggested layouts: possible, fitting, in order, and quickly found."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.layout import layout_problems
from megarl.config.schema import ParallelSection
from megarl.errors import ConfigError
from megarl.plan.job import Job, layout_of, mesh_with, plan_job, read_job, what_if
from megarl.plan.memory import GIB
from megarl.plan.search import Suggestion, estimated_seconds, suggest

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"


def job_of(model: str, gpus: int, *overrides: str, gib: float = 80.0) -> Job:
    arguments = [str(CONFIGS / f"{model}.yaml"), *overrides]
    return read_job(arguments, gpus=gpus, gpu_gib=gib, sample_tokens=None)


def suggestions(job: Job, limit: int = 5) -> list[Suggestion]:
    _, ways = what_if(job, None, offload_optimizer=False)
    return suggest(job, ways, limit)


@pytest.mark.parametrize(
    "model, gpus",
    [("qwen3-8b", 8), ("qwen3-30b-a3b", 32), ("qwen3-235b-a22b", 512), ("deepseek-v3", 1024)],
)
def test_suggestions_keep_every_rule_and_fit(model: str, gpus: int) -> None:
    job = job_of(model, gpus)
    found = suggestions(job)
    assert len(found) == 5
    assert [s.seconds for s in found] == sorted(s.seconds for s in found)
    for s in found:
        m = s.mesh
        section = ParallelSection(
            tp=m.tp,
            pp=m.pp,
            cp=m.cp,
            dp=m.dp,
            ep=m.ep,
            etp=m.etp if job.spec.experts else None,
            vpp=m.vpp,
            first_layers=m.first_layers,
            last_layers=m.last_layers,
        )
        config = job.config.model_copy(update={"parallel": section})
        assert list(layout_problems(config, gpus, job.hf)) == []
        plan = plan_job(job, mesh_with(config, m.dp), s.choices)
        assert plan.fits and plan.heaviest.total == s.heaviest  # of all stages, not of some
        assert s.seconds == estimated_seconds(job, m, s.choices)


def test_a_search_is_quick() -> None:
    job = job_of("qwen3-235b-a22b", 1024)
    start = time.process_time()
    suggestions(job)
    assert time.process_time() - start < 4.0  # 1 s on a quiet core


def test_nothing_is_suggested_where_nothing_fits() -> None:
    assert suggestions(job_of("qwen3-30b-a3b", 8, gib=40)) == []


def test_less_memory_never_finds_quicker_layouts() -> None:
    best = [suggestions(job_of("qwen3-30b-a3b", 16, gib=g), 1)[0].seconds for g in (140, 48)]
    assert best == sorted(best)


def test_the_estimate_by_hand() -> None:
    """One GPU moves nothing and waits for nothing: 6 FLOPs a parameter but the embedding's."""
    job = job_of("qwen3-8b", 1, "parallel.tp=1", gib=140)
    choices, _ = what_if(job, None, offload_optimizer=False)
    multiplied = 8_190_735_360 - 151936 * 4096
    expected = 6 * multiplied * 256 * 16384 / 400e12
    assert estimated_seconds(job, layout_of(job), choices) == pytest.approx(expected)
    again = replace(choices, recompute="full")
    assert estimated_seconds(job, layout_of(job), again) == pytest.approx(expected * 8 / 6)


@pytest.mark.parametrize(
    "gpus, overrides, keys",
    [
        (7, [], ["parallel", "parallel.ep", "--gpus"]),
        (512, ["parallel.tp=3"], ["parallel", "parallel.tp", "parallel.tp"]),
        (512, ["parallel.dp=16"], ["parallel"]),
        (512, ["parallel.first_layers=null"], ["parallel.last_layers"]),
        (512, ["parallel.vpp=3"], ["parallel.vpp"] * 3),
        (512, ["parallel.etp=5"], ["parallel.etp", "parallel.ep"]),
        (512, ["data.prompts_per_step=1"], ["data.prompts_per_step"]),
        (512, ["train.row_tokens=1001"], ["train.row_tokens"]),
    ],
)
def test_a_layout_is_refused_with_every_reason(
    gpus: int, overrides: list[str], keys: list[str]
) -> None:
    base = ["parallel.pp=4", "parallel.first_layers=23", "parallel.last_layers=23"]
    base += ["parallel.vpp=1", "parallel.cp=1", "parallel.tp=4", "parallel.ep=16"]
    with pytest.raises(ConfigError) as e:
        layout_of(job_of("qwen3-235b-a22b", gpus, *base, *overrides))
    found = [p.key for p in e.value.problems]
    assert set(keys) <= set(found), e.value
    assert all(p.found and p.accepted for p in e.value.problems)


def test_gpus_too_few_for_the_weights_are_counted() -> None:
    """6 bytes a parameter: 235,093,634,560 * 6 / (80 * 2^30) = 16.4."""
    with pytest.raises(ConfigError, match="at least 17: 1,314 GiB of weights and gradients"):
        layout_of(job_of("qwen3-235b-a22b", 16))


def test_dp_is_what_the_gpus_leave() -> None:
    job = job_of("qwen3-8b", 32, "parallel.tp=4", "parallel.pp=2", "parallel.cp=2")
    assert layout_of(job).dp == 2
    assert job.gpu_bytes == 80 * GIB


@pytest.mark.parametrize(
    "overrides, sample_tokens, rows",
    [
        ([], None, 32),  # 256 samples of a row each over 8 ranks
        ([], 2048, 4),  # eight to a row
        (["algo.minibatches=2"], None, 16),
        (["data.samples_per_prompt=1"], None, 4),
        (["parallel.pp=2", "parallel.vpp=2", "parallel.dp=4"], 5000, 20),  # 19.5; pairs
        (["parallel.pp=2", "parallel.vpp=2", "parallel.dp=4"], 4700, 20),  # 18.4 and 19 are odd
    ],
)
def test_rows_of_an_optimizer_step(
    overrides: list[str], sample_tokens: int | None, rows: int
) -> None:
    arguments = [str(CONFIGS / "qwen3-30b-a3b.yaml"), "parallel.tp=4", "parallel.ep=1", *overrides]
    job = read_job(arguments, gpus=32, gpu_gib=80, sample_tokens=sample_tokens)
    assert job.rows(layout_of(job)).count == rows
