"""The layouts, batches and objectives of ``test_split.py`` and ``test_ops_backends.py``, and how
they are evaluated. Imports nothing of Megatron.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.types import Sample
from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

ONE_ROW, SOME_ROWS, MANY_ROWS = 400, 110, 64  # tokens of a row: 1, 4 and 6 rows or more
LAYOUTS = [
    {"dp": 2},
    {"cp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2},
    {"dp": 2, "ep": 2},
]
BOTH = {"tp": 2, "ep": 2, "etp": 1}
LARGE = [{"dp": 2, "cp": 2}, {"tp": 2, "dp": 2, "ep": 2}, {"pp": 2, "vpp": 2, "cp": 2}]
LARGE_STAGES = [
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "vpp": 2, "cp": 2},
    {"pp": 4},
]

GRPO = {"name": "grpo"}
KL = {"type": "k3", "coef": 0.05}
WIDE_GSPO = {"eps_low": 0.05, "eps_high": 0.05}

# Ratios spread over about e^-1 to e^1 (``work_split.py``), so every bound is met by some tokens
ALGOS: dict[str, dict[str, Any]] = {
    "ppo, token mean": {
        "policy": {"name": "ppo_clip", "eps_high": 0.28, "dual_clip": 2.0},
        "aggregation": {"name": "token_mean"},
    },
    "ppo, seq mean": {"policy": {"name": "ppo_clip"}},
    "ppo, constant": {
        "policy": {"name": "ppo_clip"},
        "advantage": {"name": "dr_grpo"},
        "aggregation": {"name": "constant", "constant": 24},
    },
    "ppo, gae, kl, entropy": {
        "policy": {"name": "ppo_clip"},
        "advantage": {"name": "gae", "gamma": 0.99, "lam": 0.9},
        "aggregation": {"name": "token_mean"},
        "kl": KL,
        "entropy": {"name": "constant", "coef": 0.01},
    },
    "gspo": {"policy": {"name": "gspo", **WIDE_GSPO}},
    "gspo_token, gae": {
        "policy": {"name": "gspo_token", **WIDE_GSPO},
        "advantage": {"name": "gae", "lam": 0.5},  # advantages of tokens, or it would be gspo
    },
    "sapo": {"policy": {"name": "sapo"}},
    "gmpo, sequence correction": {
        "policy": {"name": "gmpo"},
        "aggregation": {"name": "group_token_mean", "denominator_mask": "kept"},
        "correction": {
            **{"level": "geometric", "mode": "mask", "low": 0.5, "high": 1.6},
            **{"k3_filter": 0.4, "batch_normalize": True},
        },
        "opsm": {"delta": 0.05},
    },
    "kl_cov, whitened": {
        "policy": {"name": "kl_cov", "ratio": 0.1},
        "advantage": {"name": "reinforce_pp", "gamma": 0.95},
        "aggregation": {"name": "token_mean"},
        "kl": {**KL, "type": "k1", "place": "reward"},
        "entropy": {"name": "adaptive", "target": 9.0, "c0": 0.02},
    },
    "aspo, entropy quantile": {
        "policy": {"name": "aspo", "entropy_quantile": 0.6},
        "advantage": GRPO,
    },
}
EDGES = ("gspo", "ppo, token mean", "ppo, gae, kl, entropy")


def cases(row_tokens: int, row_buckets: int = 1) -> list[Any]:
    """Every objective on the ordinary batch, some on the odd ones."""
    all_batches = batches()
    train = {"row_tokens": row_tokens, "row_buckets": row_buckets}
    ragged = [(name, algo, all_batches["ragged"], train) for name, algo in ALGOS.items()]
    odd = [
        (f"{name} on {batch}", ALGOS[name], samples, train)
        for name in EDGES
        for batch, samples in all_batches.items()
        if batch not in ("ragged", "shuffled")
    ]
    return ragged + odd


def evaluate(
    pool: WorkerPool, hf: Path, layout: dict[str, int], work: list[Any]
) -> dict[str, dict[str, Any]]:
    world = compare.mesh_of(layout).world_size
    results = pool.run(
        "tests.actor.work_split:gradients_of",
        world=world,
        timeout_s=300,
        hf=hf,
        layout=layout,
        cases=work,
    )
    return {
        name: {**compare.merged([r[name] for r in results]), "norm": results[0][name]["norm"]}
        for name, *_ in work
    }


def batches() -> dict[str, list[Sample]]:
    """The ordinary batch, and those at the edges."""
    whole = recorded(random_samples(6, 4, seed=5))
    whole[5] = masked(whole[5], keep=0)
    one = [masked(s, keep=1 if i == 9 else 0) for i, s in enumerate(whole)]
    return {
        "ragged": whole,
        "shuffled": [whole[i] for i in np.random.default_rng(0).permutation(len(whole))],
        "one token": one,
        "all masked": [masked(s, keep=0) for s in whole],
        "fewer than ranks": [s for s in whole if s.group == 1][:1],
        "one chunk": [masked(s, keep=1) for s in whole],  # under cp: all of it on one rank
    }


def presets() -> dict[str, dict[str, Any]]:
    """Every file of ``configs/algos/`` that trains on rewards, as one optimizer step."""
    files = sorted((Path(__file__).resolve().parents[2] / "configs" / "algos").glob("*.yaml"))
    algos = {file.stem: yaml.safe_load(file.read_text())["algo"] for file in files}
    return {name: {**algo, "minibatches": 1} for name, algo in algos.items() if name != "sft"}


def recorded(samples: list[Sample]) -> list[Sample]:
    """With values, reference log-probs and rewards in parts, as ``train_only`` may bring them."""
    rng = np.random.default_rng(7)
    return [
        replace(
            s,
            rewards=np.array([s.reward, rng.random()], np.float32),
            step_rewards=rng.normal(size=2).astype(np.float32),
            step_ends=np.array([s.mask.argmax(), len(s.tokens) - 1], np.int32),
            values=rng.normal(size=len(s.tokens)).astype(np.float32),
            ref_logprobs=(-3 * rng.random(len(s.tokens))).astype(np.float32),
        )
        for s in samples
    ]


def masked(sample: Sample, keep: int) -> Sample:
    """Only the first ``keep`` trained tokens stay trained."""
    mask = np.zeros_like(sample.mask)
    mask[np.flatnonzero(sample.mask)[:keep]] = True
    return replace(sample, mask=mask)
