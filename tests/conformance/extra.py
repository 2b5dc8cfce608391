"""Cases that no shipped vector covers, key by key of the format; expected by ``naive*.py``.

Numbers are dyadic, exact in float32 as well.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.naive import SIMPLE
from tests.conformance.naive_loss import LOSSES

COMPUTE = {**SIMPLE, **LOSSES}
Json = dict[str, Any]


def case(name: str, kind: str, config: Json, inputs: Json) -> Json:
    expected = COMPUTE[kind](config, inputs)
    return {"id": name, "kind": kind, "config": config, "inputs": inputs, "expected": expected}


def dyadic(rng: np.random.Generator, n: int, scale: float, bits: int = 12) -> list[float]:
    return (np.round(rng.normal(size=n) * scale * 2**bits) / 2**bits).tolist()


def batch(seed: int = 0, scale: float = 0.5, bits: int = 12) -> Json:
    """Nine sequences of three prompts with holes, an empty one, a masked one, one of one token."""
    rng = np.random.default_rng(seed)
    lengths = [5, 3, 7, 1, 4, 0, 3, 2, 6]
    mask = [[1] * n for n in lengths]
    mask[2][2:4], mask[6], mask[8][0], mask[8][5] = [0, 0], [0, 0, 0], 0, 0
    x: Json = {"groups": [0, 0, 0, 1, 1, 1, 1, 2, 2], "mask": mask}
    x["prompt_len"] = [3, 3, 3, 5, 5, 5, 5, 2, 2]
    x["logp"] = [(-1 - np.abs(dyadic(rng, n, 1))).tolist() for n in lengths]
    moved = {"logp_old": scale, "logp_rollout": scale, "logp_ref": 0.75}
    for name, by in moved.items():
        near = "logp_old" if name == "logp_rollout" else "logp"
        x[name] = [
            [a + b for a, b in zip(part, dyadic(rng, len(part), by, bits), strict=True)]
            for part in x[near]
        ]
    x["entropy"] = [np.abs(dyadic(rng, n, 1)).tolist() for n in lengths]
    x["advantages"] = [dyadic(rng, n, 1) for n in lengths]
    return x


def one_advantage(x: Json) -> Json:
    """The same for all tokens of a sequence, as group estimators give it."""
    return {**x, "advantages": [part[:1] * len(part) for part in x["advantages"]]}


PPO = {"algo": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
GSPO = {"algo": "gspo", "eps_low": 0.1, "eps_high": 0.15}
TOKEN_MEAN = {"mode": "token_mean"}
SEQ_MEAN = {"mode": "seq_mean_token_mean", "seq_denominator": "nonempty"}
REWARDS = [1.0, 0.0, 0.5, -1.0, 1.0, 0.25, "nan", 0.75, 0.75, 0.5, 1.0, 1.0, 0.0]
OF_GROUPS = {
    "rewards": [float(r) for r in REWARDS],
    "groups": [0, 1, 0, 1, 0, 0, 0, 2, 2, 3, 4, 4, 4],
    "lengths": [5, 3, 7, 1, 4, 2, 6, 2, 3, 4, 1, 8, 3],
    "truncated": [i in (2, 7, 12) for i in range(13)],
}

ADVANTAGES: dict[str, Json] = {
    "grpo_ddof0": {"estimator": "grpo", "ddof": 0, "eps": 1e-4},
    "grpo_scale_none": {"estimator": "grpo", "scale": "none"},
    "grpo_batch_singleton": {"estimator": "grpo", "scale": "batch", "singleton": "raw"},
    "grpo_group_singleton": {"estimator": "grpo", "scale": "group", "singleton": "raw"},
    "grpo_include": {"estimator": "grpo", "truncated_variant": "include"},
    "rloo_exclude_singleton": {
        "estimator": "rloo",
        "truncated_variant": "exclude",
        "singleton": "raw",
    },
    "dr_grpo_inert_keys": {"estimator": "dr_grpo", "ddof": 1, "eps": 1e-6, "scale": "group"},
    "grpo_loo": {"estimator": "grpo_loo", "ddof": 1, "eps": 1e-6},
    "grpo_loo_ddof0": {"estimator": "grpo_loo", "ddof": 0, "eps": 1e-6},
    "opo": {"estimator": "opo"},
    "gpg": {"estimator": "gpg", "f_norm": 2.5},
}

KL: dict[str, Json] = {
    "k2_clamped": {"type": "k2", "input_clamp": 2.0},
    "k3_free": {"type": "k3"},
    "k3_plus": {"type": "k3+", "input_clamp": 20.0, "output_clamp": 0.5},
    "k1_old": {"type": "k1", "is_weight": "old", "output_clamp": 1.0},
    "k3_self": {"type": "k3", "is_weight": "self"},
    "k3_old_clamped": {
        "type": "k3",
        "is_weight": "old",
        "input_clamp": 2.0,
        "output_clamp": 1.0,
    },
}

ELEMENTWISE: dict[str, Json] = {
    "gspo": GSPO,
    "gspo_token": {**GSPO, "algo": "gspo_token"},
    "gmpo": {"algo": "gmpo", "eps_low": 0.4, "eps_high": 0.3},
    "cispo_mask": {
        **{"algo": "cispo", "w_min": 0.5, "w_max": 1.25, "ppo_mask": True},
        **{"eps_low": 0.3, "eps_high": 0.5},
    },
    "aspo": {"algo": "aspo", "eps_low": 0.5, "eps_high": 0.9, "dual_clip": 1.5},
    "minirl": {"algo": "minirl", "eps_low": 0.4, "eps_high": 0.6, "tis_max": 1.5},
    "ppo_without_dual": {"algo": "ppo_clip", "eps_low": 0.1, "eps_high": 0.1, "dual_clip": None},
}

K3 = {"type": "k3", "coef": 0.04, "input_clamp": 20.0, "output_clamp": 10.0}
LOSS: dict[str, Json] = {
    "seq_mean_all": {**PPO, "agg": {**SEQ_MEAN, "seq_denominator": "all"}},
    "seq_sum_all": {**PPO, "agg": {"mode": "seq_mean_token_sum", "seq_denominator": "all"}},
    "group_token_mean": {**PPO, "agg": {"mode": "group_token_mean"}, "kl": K3},
    "constant": {**PPO, "agg": {"mode": "constant", "constant": 20, "seq_denominator": "all"}},
    "reinforce_entropy": {"algo": "reinforce", "agg": TOKEN_MEAN, "entropy_coef": 0.02},
    "minirl": {
        **ELEMENTWISE["minirl"],
        "agg": {"mode": "seq_mean_token_sum"},
        "kl": {"type": "k1", "coef": 0.1, "is_weight": "old"},
    },
    "aspo": {**ELEMENTWISE["aspo"], "agg": TOKEN_MEAN, "kl": {"type": "k3+", "coef": 0.2}},
    "cispo_mask": {**ELEMENTWISE["cispo_mask"], "agg": TOKEN_MEAN},
    "sapo": {
        **{"algo": "sapo", "tau_pos": 0.5, "tau_neg": 2.0, "agg": SEQ_MEAN},
        "kl": {**K3, "is_weight": "self"},
    },
    "gspo_varying": {**GSPO, "agg": SEQ_MEAN, "kl": {**K3, "is_weight": "old"}},
    "gspo_token_seq_sum": {**GSPO, "algo": "gspo_token", "agg": {"mode": "seq_mean_token_sum"}},
    "gmpo_all": {**ELEMENTWISE["gmpo"], "agg": {**SEQ_MEAN, "seq_denominator": "all"}},
    "token_mask_kept": {
        **{**PPO, "agg": {**TOKEN_MEAN, "denominator_mask": "kept"}, "entropy_coef": 0.01},
        "rollout_correction": {"level": "token", "mode": "mask", "low": 0.75, "high": 1.5},
    },
    "sequence_mask_kept": {
        **{**PPO, "agg": {**SEQ_MEAN, "denominator_mask": "kept"}, "kl": K3},
        "rollout_correction": {"level": "sequence", "mode": "mask", "low": 0.5, "high": 2.0},
    },
    "geometric_truncate": {
        **{**GSPO, "agg": SEQ_MEAN},
        "rollout_correction": {
            **{"level": "geometric", "mode": "truncate", "low": 0.9, "high": 1.1},
            "batch_normalize": True,
        },
    },
    "filters_only": {
        **{**PPO, "agg": {"mode": "group_token_mean", "denominator_mask": "kept"}},
        "rollout_correction": {"geo_filter": [0.7, 1.4], "veto": 0.4},
    },
    "token_normalized": {
        **{**PPO, "agg": {**TOKEN_MEAN, "denominator_mask": "original"}},
        "rollout_correction": {
            **{"level": "token", "mode": "truncate", "high": 1.5, "veto": 0.3},
            "batch_normalize": True,
        },
    },
    "sequence_normalized": {
        **{"algo": "gmpo", "eps_low": 0.4, "eps_high": 0.4, "agg": SEQ_MEAN},
        "rollout_correction": {
            **{"level": "sequence", "mode": "truncate", "high": 2.0},
            **{"geo_filter": [0.5, 1.5], "batch_normalize": True},
        },
    },
    "opsm_rollout": {**PPO, "agg": SEQ_MEAN, "opsm": {"delta": 0.05}, "kl": K3},
    "opsm_old": {**GSPO, "agg": SEQ_MEAN, "opsm": {"delta": 1e-4, "against": "old"}},
    "opsm_token": {
        **{**GSPO, "algo": "gspo_token", "agg": TOKEN_MEAN},
        "opsm": {"delta": -0.5, "against": "rollout"},
    },
}

CORRECTIONS: dict[str, Json] = {
    "geometric_mask": {"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.25},
    "sequence_mask_normalized": {
        **{"level": "sequence", "mode": "mask", "low": 0.25, "high": 3.0},
        "batch_normalize": True,
    },
    "token_filters": {
        **{"level": "token", "mode": "truncate", "low": 0.5, "high": 2.0},
        **{"geo_filter": [0.6, 1.6], "veto": 0.35},
    },
    "no_level": {"veto": 0.35},
}


def spoilt(x: Json, places: dict[str, list[tuple[int, int]]], value: float) -> Json:
    x = copy.deepcopy(x)
    for name, tokens in places.items():
        for i, t in tokens:
            x[name][i][t] = value
    return x


def loss_cases() -> list[Json]:
    x, nan = batch(), float("nan")
    cases = [case(f"loss/{k}", "loss", c, one_advantage(x) if "opsm" in k else x)
             for k, c in LOSS.items()]  # fmt: skip
    correction = {"level": "sequence", "mode": "mask", "low": 0.1, "high": 9.0}
    broken = {
        "ppo": (PPO, spoilt(x, {"logp": [(0, 1)], "advantages": [(2, 0)]}, nan)),
        "gspo": (GSPO, spoilt(x, {"logp_old": [(0, 1), (7, 0)]}, float("-inf"))),
        "reference": ({**PPO, "kl": K3}, spoilt(x, {"logp_ref": [(4, 2)]}, float("inf"))),
        "unread": (PPO, spoilt(x, {"logp_ref": [(4, 2)], "logp_rollout": [(4, 1)],
                                   "entropy": [(4, 0)]}, nan)),
        "rollout": (
            {**PPO, "rollout_correction": correction},
            spoilt(x, {"logp_rollout": [(0, 1), (8, 2)]}, nan),
        ),
    }  # fmt: skip
    for name, (config, inputs) in broken.items():
        cases.append(case(f"loss/nonfinite_{name}", "loss", {**config, "agg": SEQ_MEAN}, inputs))
    nothing = {**x, "mask": [[0] * len(part) for part in x["mask"]]}
    cases.append(case("loss/all_masked", "loss", {**PPO, "agg": TOKEN_MEAN}, nothing))
    return cases


def part_cases() -> list[Json]:
    """Kinds about parts of a loss."""
    x = batch(1)
    rng = np.random.default_rng(2)
    names = ("logp", "logp_ref", "logp_old", "logp_rollout", "advantages")
    each = {n: [v for part in x[n] for v in part] for n in names}
    each["logp"] += [-1.0, -2.0, -3.0, -0.25]
    each["logp_ref"] += [-26.0, 27.0, -5.5, -4.0]
    each["logp_old"] += [-1.5, -2.25, -3.5, 24.0]
    each["logp_rollout"] += [-1.25, -2.5, -3.25, 23.0]
    each["advantages"] += [1.5, -1.5, 0.0, 1.0]
    some = {"values": [dyadic(rng, len(p), 1) for p in x["mask"]],
            "values_old": [dyadic(rng, len(p), 1) for p in x["mask"]],
            "returns": [dyadic(rng, len(p), 1) for p in x["mask"]]}  # fmt: skip
    logits = {"logits": [dyadic(rng, 6, 2) for _ in range(5)], "targets": [0, 5, 2, 2, 1]}
    logits |= {"grad_logp": dyadic(rng, 5, 1), "grad_entropy": dyadic(rng, 5, 1)}
    near = {name: values[:-4] for name, values in each.items()}  # sums do not cancel
    return [
        *(case(f"kl/{k}", "kl", c, each if "clamp" in str(c) else near) for k, c in KL.items()),
        *(case(f"elementwise/{k}", "elementwise", c, each) for k, c in ELEMENTWISE.items()),
        *(case(f"correction/{k}", "rollout_correction", c, x) for k, c in CORRECTIONS.items()),
        case("mismatch", "mismatch_metrics", {}, x),
        case("value/free", "value_loss", {"value_clip": None}, {**some, "mask": x["mask"]}),
        case("value/clip", "value_loss", {"value_clip": 0.5}, {**some, "mask": x["mask"]}),
        case("logits/1", "logits", {"temperature": 1.0}, logits),
        case("kl_cov/few", "kl_cov", {"ratio": 0.01, "coef": 0.5}, x),
        case("kl_cov/many", "kl_cov", {"ratio": 0.5, "coef": 2.0}, x),
        case("long/1000", "long_accum", {"n": 1000, "seed": 7}, {}),
    ]  # fmt: skip


def advantage_cases() -> list[Json]:
    x = batch(3)
    rng = np.random.default_rng(4)
    rewards = dyadic(rng, len(x["mask"]), 1)
    of_tokens = {
        k: [dyadic(rng, len(p), 1) for p in x["mask"]] for k in ("rewards", "values", "kl")
    }
    after = dyadic(rng, len(x["mask"]), 1)
    steps = {"step_rewards": [[0.5, 1.0], [0.25], [1.0], [1.0, 1.0], []],
             "step_end": [[1, 3], [2], [0], [0, 2], []],
             "lengths": [5, 4, 1, 3, 2], "groups": [0, 0, 1, 1, 0]}  # fmt: skip
    gdpo = {"reward_components": [[1, 0, 1, 0, 1], [0.5, 0.5, 0.5, 0.25, 0.0], [0, 0, 1, 2, 3]],
            "weights": [1.0, 2.0, 0.25], "groups": [7, 7, 7, 2, 2]}  # fmt: skip
    gae = {**of_tokens, "mask": x["mask"], "bootstrap": after}
    controller = {"c0": 0.01, "target": 0.25, "delta": 0.015, "c_min": 0.005, "c_max": 0.03}
    return [
        *(case(f"advantage/{k}", "seq_advantage", c, OF_GROUPS) for k, c in ADVANTAGES.items()),
        case("process/ddof0", "process_advantage", {"ddof": 0, "eps": 1e-4}, steps),
        case("gdpo/3", "gdpo", {"eps": 1e-6}, gdpo),
        case("rf++/no_kl", "reinforce_pp", {"gamma": 1.0, "kl_coef": 0.0},
             {"rewards": rewards, "mask": x["mask"], "kl": of_tokens["kl"]}),
        case("rf++/kl", "reinforce_pp", {"gamma": 0.5, "kl_coef": 0.25},
             {"rewards": rewards, "mask": x["mask"], "kl": of_tokens["kl"]}),
        case("rf++baseline", "reinforce_pp_baseline", {},
             {"rewards": rewards, "mask": x["mask"], "groups": x["groups"]}),
        case("gae/drop", "gae", {"gamma": 0.9, "lam": 0.5, "masked_reward": "drop"}, gae),
        case("gae/credit", "gae", {"gamma": 1.0, "lam": 1.0}, gae),
        case("whiten/one", "whiten_shards", {}, {"shards": [[], [3.5], []]}),
        case("overlong/small", "overlong", {"l_max": 10, "l_cache": 3},
             {"lengths": [0, 6, 7, 8, 9, 10, 11]}),
        case("sampling", "dynamic_sampling", {},
             {"accuracy": [0, 1, 1, 1, 0, 0, 1], "groups": [5, 5, 1, 1, 0, 0, 8]}),
        case("entropy/bounds", "adaptive_entropy", controller,
             {"entropy": [0.25, 0.125, 0.125, 0.5, 0.5, 0.5, 0.25]}),
    ]  # fmt: skip


def sharded_cases() -> list[Json]:
    x = batch(5)
    layout = {"dp": 3, "cp": 2, "num_microbatches": 2}
    rows = {"batch": x, "assignment": [[[0, 5, 3], [2]], [[8, 1], []], [[4, 7, 6], []]]}
    gmpo = {
        **{**ELEMENTWISE["gmpo"], "agg": {**SEQ_MEAN, "denominator_mask": "kept"}, "kl": K3},
        "rollout_correction": {
            **{"level": "sequence", "mode": "mask", "low": 0.3, "high": 2.5},
            "batch_normalize": True,
        },
    }
    gspo = {**GSPO, "agg": {"mode": "group_token_mean"}, "opsm": {"delta": 0.01}}
    one = {"batch": x, "assignment": [[[1, 0, 2, 3, 4, 5, 6, 7, 8]]]}
    return [
        case("sharded/gmpo", "sharded", {"loss": gmpo, **layout}, rows),
        case("sharded/gspo", "sharded", {"loss": gspo, **layout}, rows),
        case("sharded/one", "sharded",
             {"loss": gspo, "dp": 1, "cp": 1, "num_microbatches": 1}, one),
    ]  # fmt: skip


def cases() -> list[Json]:
    return [*loss_cases(), *part_cases(), *advantage_cases(), *sharded_cases()]


def write(path: Path, cases: list[Json]) -> Path:
    from megarl.conformance.cases import encode  # non-finite numbers are strings in the file

    path.write_text(json.dumps({"meta": {}, "cases": encode(cases)}))
    return path
