"""The critic: its values and gradients are those of the formula, in every layout, and its state
survives a checkpoint.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.experience import split_by_group
from megarl.monitor.metrics import merge_metrics, scalar
from megarl.types import Sample, StepMetrics
from tests.actor.compare import mesh_of
from tests.actor.split_cases import batches
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

# As in test_layouts.py: fp32 sums in another order.
TOL = 2e-5
CLIP = 0.2
HEAD = "output_layer.weight"
LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"pp": 2, "vpp": 2},
]

Tensors = dict[str, torch.Tensor]


def ranks_of(pool: WorkerPool, work: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    world = mesh_of(layout).world_size
    return pool.run(f"tests.actor.work_critic:{work}", world=world, layout=layout, **arguments)


def numbers(metrics: StepMetrics) -> dict[str, Any]:
    return {m.name: scalar(m.value) for m in metrics}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """``values`` are what old values differ by from the current ones. Token 0, which pads, has no
    gradient in transformers: it is left out.
    """
    rng, found = np.random.default_rng(3), []
    for s in random_samples(8, 4, seed=1):
        values = rng.normal(0, 0.5, len(s.tokens)).astype(np.float32)
        found.append(replace(s, tokens=np.maximum(s.tokens, 1), values=values))
    return found


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).normal(0, 0.1, 64).astype(np.float32))


@pytest.fixture(scope="module")
def first_step(pool: WorkerPool, tiny_model: Path, samples: list[Sample], head: Any) -> Any:
    """One result from those of all ranks, once a layout."""
    known: dict[str, dict[str, Any]] = {}

    def run(layout: dict[str, int]) -> dict[str, Any]:
        if str(layout) not in known:
            given = {"hf": tiny_model, "samples": samples, "head": head}
            ranks = ranks_of(pool, "first_step", layout, **given)
            parts = zip(*(r["metrics"] for r in ranks), strict=True)
            found: dict[str, Any] = {
                name: {k: v for r in ranks for k, v in r[name].items()}
                for name in ("values", "returns", "gradients")
            }
            found["metrics"] = [numbers(merge_metrics(p)) for p in parts]
            known[str(layout)] = found
        return known[str(layout)]

    return run


@pytest.fixture(scope="module")
def by_transformers(
    first_step: Any, tiny_model: Path, samples: list[Sample], head: torch.Tensor
) -> tuple[dict[int, torch.Tensor], Tensors]:
    """(values of every sample, gradients of the first optimizer step's loss), from transformers'
    hidden states and the formula. The returns are ours.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    weight = head.clone().requires_grad_()
    part, values = split_by_group(samples, 2)[0], {}
    tokens = sum(samples[i].trained_tokens for i in part)
    for i, sample in enumerate(samples):
        ids = torch.from_numpy(sample.tokens).long()[None]
        v = model.model(ids).last_hidden_state[0] @ weight
        values[i] = v.detach()
        if i in part:
            v = v[:-1]
            returns = first_step({})["returns"][i][:-1]
            old = v.detach() + torch.from_numpy(sample.values[:-1])
            limited = old + (v - old).clamp(-CLIP, CLIP)
            worst = torch.maximum((v - returns) ** 2, (limited - returns) ** 2)
            (0.5 * worst[torch.from_numpy(sample.mask[1:])].sum() / tokens).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert weight.grad is not None
    return values, {**gradients, HEAD: weight.grad[None]}


def test_values_are_hidden_states_times_the_head(
    first_step: Any, by_transformers: tuple[dict[int, torch.Tensor], Tensors]
) -> None:
    expected, _ = by_transformers
    found = first_step({})["values"]
    assert sorted(found) == sorted(expected)
    assert torch.cat(list(expected.values())).std() > 0.1
    for i, values in expected.items():
        torch.testing.assert_close(found[i], values, rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_formula(
    first_step: Any, by_transformers: tuple[dict[int, torch.Tensor], Tensors]
) -> None:
    """Of the head and of all that lies below it and is stored alike by both (not the experts)."""
    _, expected = by_transformers
    found = first_step({})["gradients"]
    shared = found.keys() & expected.keys()
    assert {HEAD, "model.embed_tokens.weight", "model.norm.weight"} < shared
    assert len([n for n in shared if ".self_attn." in n]) == 4 * 6
    assert 0.05 < first_step({})["metrics"][0]["value/clipfrac"] < 0.95
    for name in shared:
        error = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error < TOL, (name, float(error))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_gradients_equal_those_of_one_process(
    first_step: Any, layout: dict[str, int]
) -> None:
    found, single = first_step(layout), first_step({})
    assert sorted(found["values"]) == sorted(single["values"])
    for i, values in single["values"].items():
        torch.testing.assert_close(found["values"][i], values, rtol=0, atol=1e-5)
    assert found["gradients"].keys() == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        assert expected.abs().max() > 0, name
        error = (found["gradients"][name] - expected).abs().max() / expected.abs().max()
        assert error < TOL, (name, float(error))
    assert found["metrics"][0] == pytest.approx(single["metrics"][0], rel=TOL)


def test_it_starts_at_zero_and_leaves_out_what_is_not_finite(
    pool: WorkerPool, tiny_model: Path
) -> None:
    samples = random_samples(8, 4, seed=2)
    (found,) = pool.run(
        "tests.actor.work_critic:at_the_start", world=1, hf=tiny_model, samples=samples
    )
    assert (found["values"] == 0).all()
    metrics = numbers(merge_metrics([found["metrics"]]))
    assert found["same"] and metrics["critic/skipped"] == 2 and metrics["critic/lr"] == 1e-3
    assert "critic/grad_norm" not in metrics
    assert found["error"].startswith("critic: ") and found["named"], found["error"]


OPTIM = {"lr": 1.0, "distributed": True}  # the critic has its own learning rate
# A step of 1e-3, and as in test_state.py.
MEAN_TOL, MAX_TOL = 1e-3 * 2e-3, 1e-3 * 0.5


def test_training_goes_on_from_a_checkpoint(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    """Bit for bit in the same layout; in another one from the same weights."""
    given = {"hf": tiny_model, "path": tmp_path / "saved", "optim": OPTIM}
    (whole,) = ranks_of(pool, "trained_on", {}, load=False, **given)
    (rest,) = ranks_of(pool, "trained_on", {}, load=True, **given)
    assert numbers(rest["metrics"]) == numbers(whole["metrics"])
    for name in ("before", "after"):
        assert_same_bits(rest[name], whole[name])
    moved = (whole["after"][HEAD] - whole["before"][HEAD]).abs()
    assert 1e-4 < moved.mean() < 2e-3
    ranks = ranks_of(pool, "trained_on", {"pp": 2, "vpp": 2}, load=True, **given)
    found = {k: {n: t for r in ranks for n, t in r[k].items()} for k in ("before", "after")}
    assert_same_bits(found["before"], whole["before"])
    for name, expected in whole["after"].items():
        gap = (found["after"][name] - expected).abs()
        assert gap.mean() < MEAN_TOL and gap.max() < MAX_TOL, name


@pytest.mark.parametrize(("layout", "tied"), [({"tp": 2}, False), ({"pp": 2}, True)], ids=str)
def test_it_starts_from_a_policys_checkpoint_and_keeps_its_head(
    pool: WorkerPool,
    tiny_model: Path,
    tmp_path: Path,
    head: Any,
    layout: dict[str, int],
    tied: bool,
) -> None:
    """The critic's head is its own, also where the policy's output layer is the embedding."""
    hf = with_tied_embeddings(tiny_model, tmp_path / "tied") if tied else tiny_model
    given = {"hf": hf, "path": tmp_path / "policy", "head": head}
    ranks = ranks_of(pool, "from_a_policy", layout, **given)
    policy, critic = ({n: t for r in ranks for n, t in r[k].items()} for k in range(2))
    assert torch.equal(critic.pop(HEAD), head[None])
    assert (policy.pop("lm_head.weight", None) is None) == tied
    assert_same_bits(critic, policy)


def test_it_starts_from_a_checkpoints_critic_or_below_its_own_head(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, head: torch.Tensor
) -> None:
    """And so do the optimizer's main parameters: a tiny step stays there."""
    given = {"hf": tiny_model, "path": tmp_path / "saved", "head": head}
    (found,) = ranks_of(pool, "started", {}, **given)
    assert not torch.equal(found["saved"][HEAD], head[None])
    assert_same_bits(found["both"], found["saved"])
    policy = {n: t for n, t in found["of the policy"].items() if n != "lm_head.weight"}
    assert_same_bits(found["alone"], {**policy, HEAD: 2 * head[None]})
    for name in ("both", "alone"):
        for tensor, after in found[f"{name}, a step later"].items():
            torch.testing.assert_close(after, found[name][tensor], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"tp": 2}))],
    ids=str,
)
def test_a_reward_model_of_another_size_is_a_start(
    pool: WorkerPool,
    tiny_model: Path,
    tmp_path: Path,
    samples: list[Sample],
    layout: dict[str, int],
) -> None:
    """Its values at every token are those of transformers, with a dense model for a policy of
    experts.
    """
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        **{"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"num_labels": 1, "tie_word_embeddings": False, "initializer_range": 0.2},
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "reward")
    work = {"hf": tiny_model, "samples": samples, "head": None}
    own = {"lr": 1e-3, "hf": str(tmp_path / "reward")}
    ranks = ranks_of(pool, "first_step", layout, critic=own, **work)
    values = {i: v for r in ranks for i, v in r["values"].items()}
    assert sorted(values) == list(range(len(samples)))
    spread = []
    for i, found in values.items():
        hidden = model.model(torch.from_numpy(samples[i].tokens).long()[None]).last_hidden_state
        expected = (hidden[0] @ model.score.weight[0]).detach()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        spread.append(expected)
    assert torch.cat(spread).std() > 0.1


def test_temperature_does_not_touch_values(
    first_step: Any, pool: WorkerPool, tiny_model: Path, samples: list[Sample], head: torch.Tensor
) -> None:
    """A distribution's temperature divides logits; a critic's output is none."""
    work = {"hf": tiny_model, "samples": samples, "head": head}
    for temperature in (0.5, 0.7, 1.9):
        (found,) = ranks_of(pool, "first_step", {}, rollout={"temperature": temperature}, **work)
        assert_same_bits(found["gradients"], first_step({})["gradients"])
        for i, values in first_step({})["values"].items():
            assert torch.equal(found["values"][i], values)


UNCLIPPED = {  # the clip could take the one token there is
    "policy": {"name": "ppo_clip"},
    "advantage": {"name": "gae", "lam": 0.9},
    "value": {"clip": None},
    **{"old_logprobs": "rollout", "minibatches": 2},
}


@pytest.mark.parametrize(
    "batch",
    [
        "one token",
        pytest.param("one chunk", marks=pytest.mark.slow),
        pytest.param("fewer than ranks", marks=pytest.mark.slow),
    ],
)
def test_a_loss_of_few_tokens_has_one_processs_gradients(
    pool: WorkerPool, tiny_model: Path, head: torch.Tensor, batch: str
) -> None:
    """One trained token, all of them on one context-parallel rank, a rank without any."""
    work = {"hf": tiny_model, "samples": batches()[batch], "head": head, "algo": UNCLIPPED}
    (single,) = ranks_of(pool, "first_step", {}, **work)
    scale = max(float(g.abs().max()) for g in single["gradients"].values())
    assert scale > 1e-3
    for layout in ({"cp": 2}, {"dp": 2}):
        ranks = ranks_of(pool, "first_step", layout, **work)
        found = {n: g for r in ranks for n, g in r["gradients"].items()}
        for name, expected in single["gradients"].items():
            bound = TOL * max(float(expected.abs().max()), 0.01 * scale)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=bound)


def with_tied_embeddings(model: Path, out: Path) -> Path:
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(out / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors")
    return out


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
