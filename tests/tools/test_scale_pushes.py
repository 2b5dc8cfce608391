"""tools/scale_pushes.py: bytes are those of closed forms, seconds those of one bound at a time."""

import contextlib
import io
import random
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.mesh import Mesh
from megarl.plan.choices import choices_of
from megarl.plan.job import read_job
from megarl.plan.parameters import (
    mtp_parameters,
    quantised_count,
    total_parameters,
)
from megarl.plan.traffic import pushed_bytes
from megarl.sync.packing import Packer
from megarl.sync.stream import pieces
from tests.helpers.tools import tool

ROOT = Path(__file__).parents[2]
QWEN, LARGE, DEEPSEEK = "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"
SHORT = {"30B": QWEN, "235B": LARGE, "V3": DEEPSEEK}


@pytest.fixture(scope="module")
def pushes() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield tool("scale_pushes")


@pytest.fixture(scope="module")
def sizes(pushes: Any) -> Any:
    """The module that ``pushes`` uses, whose results are kept."""
    import scale_push_sizes

    return scale_push_sizes


def free(pushes: Any, **given: float) -> Any:
    """Rates at which nothing takes any time but what is given."""
    nothing = {f.name: 0.0 if f.name.endswith("_s") else float("inf") for f in fields(pushes.Rates)}
    return pushes.Rates(**(nothing | {"cards": 1.0} | given))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [QWEN, LARGE, DEEPSEEK])
def test_stages_send_the_bytes_that_a_plan_counts(model: str, sizes: Any) -> None:
    job = read_job([f"configs/models/{model}.yaml"], gpus=1024, gpu_gib=1e5, sample_tokens=None)
    choices = choices_of(job.config)
    for mesh in sizes.LAYOUTS[model].meshes.values():
        for senders in (1, 4):
            sent = sizes.by_sender(sizes.weights_of(model, "bf16"), job.spec.layers, mesh, senders)
            found = [sum(map(sizes.total, stage)) for stage in sent]
            assert found == [pushed_bytes(job.spec, mesh, k, choices) for k in range(mesh.pp)]


def test_senders_take_layers_in_turn_and_the_last_one_what_is_in_none(sizes: Any) -> None:
    first, second = sizes.by_sender(sizes.weights_of(QWEN, "bf16"), 48, Mesh(pp=2, tp=4), 4)
    held = [{w.number for w in weights if w.part == "decoder"} for weights in first]
    assert held == [set(range(k, 24, 4)) for k in range(4)]
    ends = [[w.number for w in weights if w.part == "ends"] for weights in first + second]
    assert ends == [[], [], [], [0], [], [], [], [-1, -1]]  # embedding; norm and head


@pytest.mark.parametrize("model", [QWEN, LARGE, DEEPSEEK])
def test_fp8_bytes_are_a_code_an_element_and_four_a_block(model: str, sizes: Any) -> None:
    spec = sizes.spec_of(model)
    count = quantised_count(spec, Mesh(), 0)
    quantised, blocks_cut = count.shared + count.expert, 0
    if spec.mla:  # of kv_a_proj's 512 + 64 rows the last half block has scales of its own
        blocks_cut = (spec.layers + 1) * spec.hidden // 128 / 2
        one = quantised_count(replace(spec, layers=1, moe_layers=(True,)), Mesh(), 0)
        quantised += one.shared + one.expert  # the multi-token prediction layer's
    plain = sum(w.num_bytes for w in sizes.weights_of(model, "bf16"))
    weights = sizes.weights_of(model, "fp8")
    assert sum(w.quantised for w in weights) == 2 * quantised
    scales = quantised / 128**2 + blocks_cut
    assert sum(w.num_bytes for w in weights) == plain - quantised + 4 * scales


def test_whole_models_have_their_published_parameters(sizes: Any) -> None:
    spec = sizes.spec_of(DEEPSEEK)
    tables, bias = 2 * spec.vocab * spec.hidden, 256 * (58 + 1)
    numbers = total_parameters(spec) + mtp_parameters(spec) + tables  # copies of MTP's
    assert sum(w.num_bytes for w in sizes.weights_of(DEEPSEEK, "bf16")) == 2 * (numbers + bias)
    assert sum(w.num_bytes for w in sizes.weights_of(QWEN, "bf16")) == 2 * 30_532_122_624


def test_buckets_are_those_that_a_push_packs(sizes: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        groups = [[rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))] for _ in range(30)]
        tensors = iter(range(1000))
        real = [
            [(f"t{next(tensors)}", torch.zeros(n, dtype=torch.uint8)) for n in group]
            for group in groups
        ]
        packed = Packer(64, torch.device("cpu")).pack(pieces(real))
        expected = sorted((bucket.flat.numel(), len(bucket.specs)) for bucket in packed)
        found = sizes.buckets(((sum(group), len(group)) for group in groups), 64)
        assert sorted((bucket.num_bytes, bucket.tensors) for bucket in found) == expected


# --- seconds --------------------------------------------------------------------------------------


def simulated(made: Sequence[Sequence[float]], turns: Sequence[Sequence[float]]) -> float:
    """Seconds until every bucket of every sender had its turn: ``made[k][i]`` to make sender k's
    bucket i, which starts when the one before is made and the one before that is sent; turns come
    in the order in which buckets are ready.
    """
    next_of, ready_at, sent_at = [0] * len(made), [0.0] * len(made), [[0.0]] * len(made)
    for k, own in enumerate(made):
        ready_at[k] = own[0]
    now = 0.0
    while waiting := [k for k, own in enumerate(made) if next_of[k] < len(own)]:
        k = min(waiting, key=lambda k: ready_at[k])
        start, i = max(now, ready_at[k]), next_of[k]
        now, next_of[k] = start + turns[k][i], i + 1
        sent_at[k] = [*sent_at[k], now]
        if i + 1 < len(made[k]):  # its making began as this turn could, with the other buffer free
            ready_at[k] = max(ready_at[k], sent_at[k][i]) + made[k][i + 1]
    return now


@pytest.mark.parametrize("slower", ["making", "turns"])
def test_one_sender_takes_as_long_as_its_slower_half_and_one_bucket(
    slower: str, pushes: Any
) -> None:
    n, m, s = 7, *((3.0, 2.0) if slower == "making" else (2.0, 3.0))
    expected = simulated([[m] * n], [[s] * n])
    assert expected == max(n * m, n * s) + min(m, s)
    assert pushes.overlapped([n * m], n * s, [n]) == pytest.approx(expected)


def test_many_senders_take_what_their_turns_do_within_a_round(pushes: Any) -> None:
    rng = random.Random(1)
    for _ in range(200):
        senders, n = rng.randrange(1, 9), rng.randrange(2, 12)
        m, s = rng.uniform(0.1, 4), rng.uniform(0.1, 1)
        expected = simulated([[m] * n] * senders, [[s] * n] * senders)
        found = pushes.overlapped([n * m] * senders, senders * n * s, [n] * senders)
        assert found <= expected + 1e-9 <= found + senders * s + m


BYTES, TENSORS, RANKS = 61_064_245_248, 18_867, 16  # of Qwen3-30B, and its half of 32 GPUs
GATHERS = 48 * (128 * 2 / 8 + 7) + 3  # of a layer: experts of ep 8, attention 4, norms 2, router
ONE_BOUND: list[tuple[str, dict[str, float], float, float]] = [
    # what decides; the only rates; seconds around; seconds that buckets take, each
    ("sender's card", {"nic": 40e9}, BYTES / 40e9, 0),
    ("sender's card", {"nic": 10e9, "cards": 4}, BYTES / 40e9, 0),
    ("sender's card", {"hop_s": 1e-5, "nic": 1e30}, 0, 17e-5),
    ("requests", {"call_s": 2e-3, "request_s": 1e-3}, 7 * 2e-3 + 3 * 4e-3, 2e-3 + 4e-3),
    ("servers' processes", {"load_s": 5e-5}, TENSORS * 5e-5, 0),
    ("servers' processes", {"server_digest_s": 5e-5}, TENSORS * 5e-5, 0),
    ("servers' memory", {"server_digest": 4e10}, BYTES / 4e10, 0),
    ("sender's process", {"pack_s": 1e-4}, TENSORS * 1e-4, 0),
    ("digest", {"digest": 1e10}, BYTES / 1e10, 0),
    ("gather", {"gather_s": 1e-3}, GATHERS * 1e-3, 0),
]


@pytest.mark.parametrize(("decides", "rates", "around", "each"), ONE_BOUND)
def test_a_push_that_one_bound_decides_takes_its_closed_form(
    decides: str, rates: dict[str, float], around: float, each: float, pushes: Any
) -> None:
    found = pushes.push(pushes.Case(QWEN, "bf16", RANKS, rates=free(pushes, **rates)))
    assert found["seconds"] == pytest.approx(around + found["buckets"] * each)
    assert found["decides"] == decides


def test_digests_of_every_rank_of_every_server_come_to_rank_0(pushes: Any) -> None:
    """17 times: the senders' own, too. An entry is its name, 16 digits and 8 signs around them."""
    names = sum(
        len(f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight") + 24
        for layer in range(48)
        for e in range(128)
        for part in ("gate", "up", "down")
    )
    found = pushes.push(pushes.Case(QWEN, "bf16", RANKS, rates=free(pushes, json=1e6)))
    assert found["decides"] == "comparison"
    assert found["seconds"] == found["compare"] > 17 * names / 1e6
    assert found["seconds"] < 1.05 * 17 * names / 1e6  # attention and norms are few


def test_gathers_cross_nodes_only_for_groups_that_do(pushes: Any, sizes: Any) -> None:
    weight = sizes.Weight("decoder", 0, 0, 1600, 0, ((1600, 1),), 1600, 1, 0)
    dense = replace(weight, expert=None)
    rates = free(pushes, nvlink=100.0, nic=10.0)
    inside = pushes.Case(LARGE, "bf16", 128, rates=rates)  # ep 8, tp 4
    across = pushes.Case(DEEPSEEK, "bf16", 256, rates=rates)  # ep 16, tp 8
    seconds = [
        pushes.making(case, [w])["gather"] for case in (inside, across) for w in (weight, dense)
    ]
    own, near, far = 1 / 16, 7 / 16, 8 / 16
    assert own + near + far == 1
    assert seconds == pytest.approx(
        [1600 * 7 / 8 / 100, 1600 * 3 / 4 / 100, 1600 * (near / 100 + far / 10), 1600 * 7 / 8 / 100]
    )


def test_senders_of_one_expert_group_share_its_experts(pushes: Any, sizes: Any) -> None:
    """A stage of 8 ranks is one group of ep 8."""
    mesh = sizes.LAYOUTS[LARGE].meshes[32]
    assert (mesh.stage_size, mesh.ep, mesh.etp) == (8, 8, 1)
    weights = sizes.weights_of(LARGE, "bf16")
    for stage in sizes.by_sender(weights, sizes.spec_of(LARGE).layers, mesh, 4):
        of_experts = [[w.expert for w in part if w.expert is not None] for part in stage]
        assert [set(numbers) for numbers in of_experts] == [
            set(range(32 * k, 32 * (k + 1))) for k in range(4)
        ]
        assert len(set(map(len, of_experts))) == 1
    rates = free(pushes, nvlink=100e9)
    one = pushes.Case(LARGE, "bf16", 32, rates=rates)
    experts = [w for w in weights if w.expert is not None]
    alone, shared = (
        pushes.making(replace(one, senders=k), experts)["gather"] * 100e9 / sizes.total(experts)
        for k in (1, 4)
    )
    assert (alone, shared) == pytest.approx((7 / 8, 1 / 2))  # of eight ranks' experts, of two's


def test_senders_make_at_the_same_time(pushes: Any) -> None:
    rates = free(pushes, pack_s=1e-4)
    for trainers in (32, 256):
        one = pushes.Case(LARGE, "bf16", trainers, rates=rates)
        alone, four = (pushes.push(replace(one, senders=k))["making"] for k in (1, 4))
        assert alone == pytest.approx(4 * four)


def test_a_change_moves_its_share_and_costs_every_rank_the_whole(pushes: Any) -> None:
    case = pushes.Case(QWEN, "bf16", RANKS, rates=free(pushes, nic=40e9), delta=0.1)
    assert pushes.push(case)["seconds"] == pytest.approx(0.1 * BYTES / 40e9)
    slow = replace(case, rates=free(pushes, nic=1e30, encode=2e9, apply=1e9, pcie=2e9))
    found = pushes.push(slow)
    assert found["making"] == pytest.approx(BYTES / 1e9)
    assert found["turns"] == pytest.approx(BYTES / 1e9 + BYTES / 2e9)
    told = replace(case, rates=free(pushes, json=1e6, nic=1e30))  # before, and after
    once = pushes.push(replace(told, delta=None))["compare"]
    assert pushes.push(told)["compare"] == pytest.approx(once * (2 * RANKS + 1) / (RANKS + 1))


def test_one_node_has_no_cards_between_its_halves(pushes: Any) -> None:
    for trainers, limit in ((4, "NVLink"), (8, "sender's card")):
        assert pushes.Case(QWEN, "bf16", trainers).link[1] == limit
    wide = pushes.Rates(nic=10e9, cards=100)
    assert pushes.Case(QWEN, "bf16", 8, rates=wide).link == (80e9, "servers' cards")
    assert pushes.Case(QWEN, "bf16", 8, rates=replace(wide, nic=40e9)).link == (200e9, "NVLink")


def test_colocated_ranks_read_a_bucket_whole_and_their_part(pushes: Any) -> None:
    rates = free(pushes, nvlink=1e9, load_s=1e-4, request_s=1e-3)
    found = pushes.colocated("bf16", rates)
    assert found["read"] == pytest.approx(BYTES * (7 + 7 / 8) / 1e9)
    assert found["loaded"] == pytest.approx(TENSORS * 1e-4)
    first = found["making"] / 57  # buckets of 1 GiB
    together = found["read"] + found["loaded"] + (57 + 3) * 1e-3 + first
    assert found["seconds"] == pytest.approx(together)


# --- the program and its page ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(pushes: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found = pushes.main([])
    return found, out.getvalue()


def test_the_page_has_the_tables_that_the_tool_prints(printed: tuple[dict[str, Any], str]) -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    tables = [part.strip() for part in printed[1].split("\n\n")]
    assert len(tables) == 5
    for table in tables:
        assert table in page, f"docs/scale.md: not as printed: {table.splitlines()[0]}"


def test_figures_beside_published_ones_are_the_tools(printed: tuple[dict[str, Any], str]) -> None:
    """They are written as ``seconds (model, form, GPUs)``."""
    page = (ROOT / "docs" / "scale.md").read_text()
    told = re.findall(r"([\d.]+) \((30B|235B|V3), (bf16|fp8), (\d+)\)", page)
    assert len(told) >= 6
    of = {(p["model"], p["form"], p["gpus"]): p["seconds"] for p in printed[0]["pushes"]}
    for seconds, model, form, gpus in told:
        assert float(seconds) == pytest.approx(of[SHORT[model], form, int(gpus)], abs=0.051)


def test_an_unknown_rate_is_refused_with_those_that_are_known(
    pushes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pushes.main(["--rate", "nics=1"])
    assert "nics: found no such rate; accepted: ['nic', " in capsys.readouterr().err


def test_rates_of_processes_are_measured(pushes: Any) -> None:
    import scale_push_rates

    found = scale_push_rates.measure(tensors=200, servers=2, tries=1)
    known = {f.name for f in fields(pushes.Rates) if f.metadata["known"] == "measured"}
    assert set(found) == known - {"load_s"}  # SGLang's
    assert all(value > 0 for value in found.values())
