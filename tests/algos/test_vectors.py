"""The published test vectors, values and gradients: ``tests/vectors/objectives.json``.

Tolerances are the vectors' own, by dtype. In float32 (what the trainer uses) log-probs are dyadic,
hence exact, and every clip decision has a margin, so only rounding of the arithmetic remains.
Float64 shows that what is left there is rounding and not a wrong formula.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.advantages import EPS, group_advantages
from megarl.algos.normalize import token_weights
from megarl.algos.presets import SURROGATES
from megarl.algos.ratio import sequence_log_ratio
from megarl.data.packing import build_row
from megarl.monitor.metrics import merge_metrics
from megarl.types import Max, Mean, Min, PackedBatch, Sample
from tests.algos import ragged
from tests.helpers.dist import WorkerPool

FILE = Path(__file__).parent.parent / "vectors" / "objectives.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())["cases"]}

COVERED = {
    "seq_advantage": [
        "adv_grpo_ddof1_eps1e-6",
        "adv_dr_grpo_mean_only",
        "adv_rloo",
        "adv_grpo_nan_rewards",
    ],
    "elementwise": ["ew_reinforce", "ew_dapo_clip_higher_dual3", "ew_sapo_1.0_1.05"],
    "loss": [
        "loss_ppo_dual_token_mean",
        "loss_ppo_dual_seq_mean_token_mean",
        "loss_sapo",
        "loss_gspo_band",
    ],
    "sharded": ["shard_ppo_token_mean", "shard_gspo_seq_mean"],
    "logits": ["logits_temp_0.625"],
    "long_accum": ["long_sequence_sum_131072"],
}

# Not implemented: other estimators, objectives and aggregations, KL and entropy terms, corrections,
# critics, shaping.
LATER = [
    "adv_grpo_batch_std",
    "adv_skywork_truncated_exclude",
    "adv_process_supervision",
    "adv_gdpo_two_rewards",
    "adv_reinforce_pp",
    "adv_reinforce_pp_baseline",
    "whiten_shard_merge",
    "kl_k1",
    "kl_k2",
    "kl_k3_clamped_20_10",
    "kl_k3_is_weight_old",
    "ew_cispo_wmax_only",
    "ew_aspo_dual3",
    "ew_minirl",
    "loss_ppo_dual_constant",
    "loss_grpo_k3_entropy",
    "loss_cispo",
    "loss_gspo_token_varying_adv",
    "loss_gmpo",
    "loss_ppo_tis_token_2",
    "loss_poison_ppo_k3",
    "rc_token_mask_icepop",
    "rc_seq_tis",
    "mismatch_metrics",
    "gae_099_095",
    "value_loss_clip_0.2",
    "overlong_dapo",
    "dynamic_sampling",
    "adaptive_entropy_paper",
    "kl_cov_topk",
]

# The trainer's metric names and the vectors'
METRICS = {
    "clipfrac_high": "clipfrac_high",
    "clipfrac_low": "clipfrac_low",
    "clipfrac_dual": "clipfrac_dual",
    "approx_kl": "approx_kl_k1",
    "ratio_mean": "ratio_mean",
    "ratio_min": "ratio_min",
    "ratio_max": "ratio_max",
    "seq_ratio_mean": "seq_geo_ratio_mean",
    "seq_ratio_min": "seq_geo_ratio_min",
    "seq_ratio_max": "seq_geo_ratio_max",
}


def covered(kind: str) -> Any:
    return pytest.mark.parametrize("name", COVERED[kind])


def covered_in_both_dtypes(kind: str) -> Any:
    """SAPO holds its temperatures in float32: there is no float64 to compare."""
    dtypes = (torch.float32, torch.float64)
    pairs = [(n, d) for n in COVERED[kind] for d in dtypes[: 1 if "sapo" in n else 2]]
    return pytest.mark.parametrize(("name", "dtype"), pairs, ids=str)


def numbers(values: Any) -> Any:
    """Non-finite numbers are strings in the file."""
    if isinstance(values, str):
        return float(values)
    return [numbers(v) for v in values] if isinstance(values, list) else values


def tolerance(name: str, dtype: torch.dtype) -> dict[str, float]:
    return dict(CASES[name]["tolerance"][str(dtype).removeprefix("torch.")])


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a policy. Nothing of a case's configuration may be left unused."""
    settings = {k: v for k, v in config.items() if k not in ("algo", "agg")}
    assert config.get("agg", {}).keys() <= {"mode", "seq_denominator"}
    assert config.get("agg", {}).get("seq_denominator", "nonempty") == "nonempty"
    return {"name": config["algo"], **settings}  # the schema refuses unknown settings


def assert_ragged(found: ragged.Ragged, expected: ragged.Ragged, **tolerances: float) -> None:
    assert [len(part) for part in found] == [len(part) for part in expected]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), **tolerances)


def test_every_case_is_covered_or_left_to_later() -> None:
    listed = [name for names in COVERED.values() for name in names] + LATER
    assert len(listed) == len(set(listed))
    assert set(listed) == set(CASES)
    for kind, names in COVERED.items():
        assert {CASES[name]["kind"] for name in names} == {kind}


@covered("seq_advantage")
def test_advantages(name: str) -> None:
    case = CASES[name]
    config = {"ddof": 1, "eps": EPS, **case["config"]}
    assert config == {"estimator": config["estimator"], "ddof": 1, "eps": EPS}
    rewards = numbers(case["inputs"]["rewards"])
    found = group_advantages(config["estimator"], rewards, case["inputs"]["groups"])
    np.testing.assert_allclose(
        found, case["expected"]["advantages"], **tolerance(name, torch.float64)
    )
    assert (found[~np.array(case["expected"]["valid"])] == 0).all()


@covered_in_both_dtypes("elementwise")
def test_token_losses_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    inputs, segments = ragged.row(
        logp=[given["logp"]],
        old=[given["logp_old"]],
        advantages=[given["advantages"]],
        weight=[[1.0] * len(given["logp"])],
        dtype=dtype,
    )
    settings = settings_of(CASES[name]["config"])
    loss = SURROGATES[settings["name"]](inputs, segments, ragged.policy(**settings)).loss
    loss.sum().backward()
    assert inputs.logprobs.grad is not None
    close = tolerance(name, dtype)
    np.testing.assert_allclose(loss.detach().numpy(), expected["token_loss"], **close)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), expected["grad_logp"], **close)


@covered_in_both_dtypes("loss")
def test_losses_gradients_and_metrics_of_a_batch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    given, expected = numbers_of(case["inputs"]), case["expected"]
    counts = [int(sum(part)) for part in given["mask"]]
    weights = token_weights(case["config"]["agg"]["mode"], counts)
    masked_weights = [
        [w * m for m in part] for w, part in zip(weights.tolist(), given["mask"], strict=True)
    ]
    assert_ragged(masked_weights, expected["token_weight"], rtol=1e-12)
    inputs, segments = row_of(given, weights, dtype)
    settings = settings_of(case["config"])
    found = ragged.evaluate(settings, inputs, segments)
    close = tolerance(name, dtype)
    np.testing.assert_allclose(found.loss, expected["loss"], **close)
    assert_ragged(found.grad, expected["grad_logp"], **close)
    # by itself a surrogate expects zeros where nothing is trained
    clean = {k: where_trained(given, k) for k in ("logp", "logp_old", "advantages")}
    inputs, segments = row_of({**given, **clean}, weights, dtype)
    token = SURROGATES[settings["name"]](inputs, segments, ragged.policy(**settings)).loss
    found_tokens = (token.detach() * inputs.mask).double()
    np.testing.assert_allclose(found_tokens, np.concatenate(expected["token_pg_loss"]), **close)
    assert_metrics(found, expected["metrics"], close)


def assert_metrics(
    found: ragged.Evaluated, expected: Mapping[str, float], close: Mapping[str, float]
) -> None:
    values = {m.name.removeprefix("policy/"): m.value for m in merge_metrics([found.metrics])}
    for ours, theirs in METRICS.items():
        if ours not in values:
            assert "clipfrac" in ours and expected[theirs] == 0, f"{ours} is missing"
            continue
        value = found.value(f"policy/{ours}")
        np.testing.assert_allclose(value, expected[theirs], **close, err_msg=ours)
    counts = {
        "ratio_mean": expected["n_tokens"],
        "approx_kl": expected["n_tokens"],
        "seq_ratio_mean": expected["n_nonempty_sequences"],
    }
    assert {n: v.count for n, v in values.items() if n in counts and isinstance(v, Mean)} == counts
    for name in ("ratio", "seq_ratio"):
        assert isinstance(values[f"{name}_min"], Min) and isinstance(values[f"{name}_max"], Max)


@pytest.mark.dist
@covered("sharded")
def test_shares_of_data_and_context_parallel_ranks_add_up(pool: WorkerPool, name: str) -> None:
    """Rows as the trainer packs them, cut as its context-parallel ranks cut them."""
    case = CASES[name]
    given, expected = numbers_of(case["inputs"]["batch"]), case["expected"]
    cp = case["config"]["cp"]
    settings = settings_of(case["config"]["loss"])
    counts = [int(sum(part)) for part in given["mask"]]
    assert sum(counts) == expected["global_token_count"]
    weights = token_weights(case["config"]["loss"]["agg"]["mode"], counts)
    rows = {
        (dp, mb): packed(given, weights, members, multiple=2 * cp)
        for dp, rows in enumerate(case["inputs"]["assignment"])
        for mb, members in enumerate(rows)
    }
    work = [(settings, row) for row, _ in rows.values()]
    ranks = pool.run("tests.algos.work_rows:shares", world=cp, cases=work)

    close = tolerance(name, torch.float32)
    total, grad = 0.0, [[0.0] * len(part) for part in given["mask"]]
    for shard in expected["shards"]:
        dp, mb = shard["dp_rank"], shard["microbatch"]
        result = ranks[shard["cp_rank"]][list(rows).index((dp, mb))]
        share, where = float(result["loss"]), rows[dp, mb][1]
        part = shard["local_loss_numerator_over_global_denominator"]
        np.testing.assert_allclose(share, part, **close)
        held = set(result["index"].tolist())
        assert [
            [i, [t for t in range(len(given["mask"][i])) if where[i, t] in held]]
            for i, _ in shard["tokens"]
        ] == shard["tokens"]
        total += share
        for (i, t), position in where.items():
            grad[i][t] += float(result["grad"][position])
    np.testing.assert_allclose(total, expected["loss"], **close)
    assert_ragged(grad, expected["grad_logp"], **close)
    norm = np.linalg.norm(np.concatenate(grad))
    np.testing.assert_allclose(norm, expected["grad_norm"], **close)


def packed(
    given: Mapping[str, Any], weights: Any, members: list[int], *, multiple: int
) -> tuple[dict[str, torch.Tensor], dict[tuple[int, int], int]]:
    """(the row's tensors, row position of response token t of sequence i)."""
    samples = [sample_of(given, i) for i in range(len(given["mask"]))]
    size = sum(-(-len(samples[i].tokens) // multiple) * multiple for i in members)
    batch: PackedBatch = build_row(
        samples,
        members,
        advantages=[part[0] if part else 0.0 for part in given["advantages"]],
        weights=weights.tolist(),
        length=size + multiple,  # with padding at the end
        segment_multiple=multiple,
    )
    starts = batch.cu_seqlens.tolist()
    where = {
        (i, t): starts[k] + given["prompt_len"][i] - 1 + t
        for k, i in enumerate(members)
        for t in range(len(given["mask"][i]))
    }
    fields = {}
    for field, source in (("logprobs", "logp"), ("old_logprobs", "logp_old")):
        values = torch.full((len(batch.tokens),), float("nan"))
        for (i, t), position in where.items():
            values[position] = given[source][i][t]
        fields[field] = values
    fields["entropy"] = torch.zeros(len(batch.tokens))
    for field in ("rollout_logprobs", "advantages", "weight", "mask", "cu_seqlens"):
        fields[field] = getattr(batch, field)
    return fields, where


def sample_of(given: Mapping[str, Any], i: int) -> Sample:
    prompt, mask = given["prompt_len"][i], given["mask"][i]
    length = prompt + len(mask)
    return Sample(
        prompt_id=f"p{i}",
        group=given["groups"][i],
        index=i,
        tokens=np.arange(length, dtype=np.int32),
        mask=np.array([False] * prompt + [bool(m) for m in mask]),
        rollout_logprobs=np.zeros(length, np.float32),
        rewards=np.zeros(1, np.float32),
        correct=False,
        truncated=False,
    )


@pytest.mark.dist
@covered("logits")
def test_log_probs_and_entropy_of_logits(pool: WorkerPool, name: str) -> None:
    inputs, config = CASES[name]["inputs"], CASES[name]["config"]
    work = "tests.algos.work_rows:log_softmax"
    (found,) = pool.run(work, world=1, inputs=inputs, **config)
    for key, expected in CASES[name]["expected"].items():
        np.testing.assert_allclose(found[key], expected, **tolerance(name, torch.float32))


@covered("long_accum")
def test_a_long_sequence_is_summed_without_loss(name: str) -> None:
    """131072 log-ratios of about 1e-3: a plain float32 sum is off by 1.5e-5."""
    config, expected = CASES[name]["config"], CASES[name]["expected"]
    x, d = config["seed"], []
    for _ in range(config["n"]):
        x = (1664525 * x + 1013904223) % 2**32
        d.append(((x >> 12) / 2**20 - 0.5) / 64)
    assert d[:4] == expected["first_four_d"]
    zeros = [[0.0] * len(d)]
    inputs, segments = ragged.row(logp=[d], old=zeros, advantages=zeros, weight=zeros)
    mean = float(sequence_log_ratio(inputs, segments).detach())
    assert mean * len(d) == pytest.approx(expected["sum_exact"], rel=1e-12)
    assert np.exp(mean) == pytest.approx(expected["s_ratio"], rel=1e-12)


def numbers_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: numbers(values) for name, values in inputs.items()}


def where_trained(given: Mapping[str, Any], field: str) -> ragged.Ragged:
    """The field with zeros at masked tokens."""
    pairs = zip(given[field], given["mask"], strict=True)
    return [[x if m else 0.0 for x, m in zip(*pair, strict=True)] for pair in pairs]


def row_of(given: Mapping[str, Any], weights: Any, dtype: torch.dtype) -> Any:
    return ragged.row(
        logp=given["logp"],
        old=given["logp_old"],
        advantages=given["advantages"],
        weight=ragged.spread(weights.tolist(), given["mask"]),
        mask=given["mask"],
        dtype=dtype,
    )
