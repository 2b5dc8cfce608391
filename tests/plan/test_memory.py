"""Memory and traffic by hand: schedules, choices, and what cannot be measured on a CPU."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.config.load import load_config
from megarl.data.moves import EVERY_RANK, Moves
from megarl.mesh import Mesh
from megarl.plan.activations import head_bytes, layer_bytes
from megarl.plan.choices import Choices, Rows, choices_of
from megarl.plan.memory import chunk_passes, plan_memory, stage_memory
from megarl.plan.parameters import quantised_count
from megarl.plan.traffic import bubble, rollout_bytes, step_traffic
from tests.helpers.samples import random_samples
from tests.plan.published import DEEPSEEK_V3, QWEN3_8B, QWEN3_30B

BF16 = Choices()


def in_flight(pp: int, vpp: int, rows: int, stage: int) -> int:
    """Passes begun before the first backward pass of a stage: its own forward passes come in order,
    and the first backward pass needs chunk vpp - 1 of row 0 to have reached the last stage and its
    gradient to have come back; meanwhile a stage goes on with what it may.
    """
    if vpp == 1:
        return min(rows, pp - stage)
    warm_up = min(rows * vpp, (pp - stage - 1) * 2 + (vpp - 1) * pp)
    return min(rows * vpp, warm_up + 1)


@pytest.mark.parametrize("pp, vpp, rows", [(1, 1, 8), (4, 1, 8), (4, 1, 2), (2, 2, 6), (4, 3, 8)])
def test_rows_in_flight_are_those_of_the_schedule(pp: int, vpp: int, rows: int) -> None:
    for stage in range(pp):
        passes = chunk_passes(Mesh(pp=pp, vpp=vpp), stage, rows)
        assert sum(passes.values()) == in_flight(pp, vpp, rows, stage)
        assert set(passes) <= set(range(vpp))
        # chunk k begins only when pp rows have been through chunk k - 1
        assert list(passes.values()) == sorted(passes.values(), reverse=True)


def test_the_bubble_is_the_textbooks() -> None:
    assert bubble(Mesh(), 8) == 0
    assert bubble(Mesh(pp=4), 12) == 3 / 12
    assert bubble(Mesh(pp=4, vpp=3), 12) == 3 / 36


def test_a_dense_model_on_one_gpu_by_hand() -> None:
    """Qwen3-8B, a row of 4,096 tokens: 18 bytes a parameter of states."""
    (found,) = plan_memory(QWEN3_8B, Mesh(), BF16, Rows(4096, 4096, 1))
    assert found.parameters == 2 * 8_190_735_360
    assert found.gradients == 4 * 8_190_735_360
    assert found.optimizer == 12 * 8_190_735_360
    t, h, q, k, i, heads, kv = 4096, 4096, 4096, 1024, 12288, 32, 8
    norms = 2 * (2 * h + 4) + 2 * q + 4 * heads + 2 * (q + 2 * k) + 4 * kv
    products = 2 * (h + h + 5 * i + q)  # into q, k, v; into the MLP; its inside; into the output
    attention = 2 * (2 * q + 2 * k) + 4 * heads + 8 + 8 * 128  # with the rotary tables
    assert found.row == t * (36 * (norms + products + attention) + 8)
    assert found.head == t * (2 * h + 4 + 2 * h + 2 * 151936 + 56)


def test_axes_divide_what_they_split() -> None:
    def kept(mesh: Mesh, moe: bool = True) -> float:
        return layer_bytes(QWEN3_30B, mesh, Rows(8192, 1024, 1), BF16, moe=moe).kept

    one = kept(Mesh())
    assert one / 4 < kept(Mesh(tp=4, etp=1)) < one / 3  # but the rotary tables
    split = kept(Mesh(cp=2)) - 2 * 4096 * 1024  # without a mask of 1,024 for each token
    assert one / 2 <= split < one / 1.9  # but keys and values, which are gathered
    assert kept(Mesh(ep=8, dp=8)) == one  # popular alike, experts get as many tokens as were sent
    assert kept(Mesh(tp=4, etp=4)) > kept(Mesh(tp=4, etp=1))  # every rank of etp has them all
    head = [head_bytes(QWEN3_30B, Mesh(tp=tp), Rows(8192, 1024, 1), BF16) for tp in (1, 4)]
    assert head[1] < head[0] / 3.9


def test_choices_take_away_what_they_say() -> None:
    def memory(**choices: object) -> object:
        chosen = replace(BF16, **choices)
        mesh = Mesh(tp=4, dp=8, ep=8, etp=1)
        return stage_memory(QWEN3_30B, mesh, 0, chosen, Rows(16384, 16384, 8))

    plain = memory()
    offloaded = memory(offloaded=1.0)
    assert (offloaded.optimizer, offloaded.host) == (0.0, plain.optimizer)
    assert memory(distributed_optimizer=False).optimizer == 12 * plain.count.trained
    assert memory(moment_bytes=(2, 2)).optimizer == pytest.approx(plain.optimizer * 8 / 12)
    full, chosen = memory(recompute="full"), memory(recompute="selective")
    assert full.row < chosen.row < plain.row
    assert full.row == 48 * 2 * 2048 * 16384 / 4 + 8 * 16384


def test_fp8_copies_the_matrices_of_layers_or_takes_their_place() -> None:
    """Qwen3-30B-A3B, 24 of its 48 layers on a stage: q and out of 4,096, k and v of 512 each; 128
    experts of 768; nothing of norms, router and embedding.
    """
    mesh = Mesh(tp=2, pp=2, dp=8, ep=8, etp=1)
    attention, experts = (2 * 4096 + 2 * 512) * 2048 // 2, 128 // 8 * 3 * 2048 * 768

    def memory(**choices: object) -> object:
        chosen = replace(BF16, **choices)
        return stage_memory(QWEN3_30B, mesh, 0, chosen, Rows(16384, 16384, 8))

    plain = memory()
    for bf16_layers, layers in (((0, 0), 24), ((3, 0), 21), ((0, 3), 24), ((30, 0), 0)):
        matrices = layers * (attention + experts)
        beside = memory(fp8=True, bf16_layers=bf16_layers)
        assert beside.row < plain.row
        assert beside.parameters == plain.parameters + 2 * matrices
        assert memory(fp8=True, fp8_stored=True, bf16_layers=bf16_layers).parameters == (
            plain.parameters
        )

    def sent(**choices: object) -> float:
        traffic = step_traffic(QWEN3_30B, mesh, replace(BF16, **choices), Rows(16384, 16384, 8))
        return next(x.num_bytes for x in traffic if x.axis == "dp")

    # over 8 ranks attention, over 2 experts: a byte less of each new matrix
    saved = sent(fp8=True) - sent(fp8=True, fp8_stored=True)
    assert saved == pytest.approx(24 * (attention * 7 / 8 + experts / 2))
    assert sent(fp8=True) == sent()


def test_a_quantised_dense_layer_and_a_latent_one_by_hand() -> None:
    """Qwen3-8B: q and out of 4,096, k and v of 1,024, an MLP of 12,288. DeepSeek-V3: ranks of 1,536
    and 512, 128 heads of 128 + 64 and 128, three dense layers of 18,432, one shared expert.
    """
    dense = (2 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 12288
    assert quantised_count(QWEN3_8B, Mesh(), 0).parameters == 36 * dense
    h, heads = 7168, 128
    latent = h * (1536 + 512 + 64) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * h
    moe = 58 * (3 * h * 2048 * (256 + 1))
    found = quantised_count(DEEPSEEK_V3, Mesh(), 0)
    assert found.parameters == 61 * latent + 3 * (3 * h * 18432) + moe


def test_selective_recomputation_adds_up() -> None:
    """What a module drops and what is kept make the whole, for every module there is."""
    mesh = Mesh(tp=2, etp=2)
    for moe in (True, False):
        whole = layer_bytes(DEEPSEEK_V3, mesh, Rows(4096, 4096, 1), BF16, moe=moe)
        assert whole.again == 0
        for module in ("core_attn", "layernorm", "mlp", "moe", "mla_up_proj", "shared_experts"):
            some = replace(BF16, recompute="selective", recompute_modules=(module,))
            found = layer_bytes(DEEPSEEK_V3, mesh, Rows(4096, 4096, 1), some, moe=moe)
            assert found.kept + found.again == pytest.approx(whole.kept)
            applies = {"mlp": not moe, "moe": moe, "shared_experts": moe}
            assert (found.again > 0) == applies.get(module, True)


def test_full_recomputation_keeps_inputs_by_its_method() -> None:
    """48 layers: every fourth, or those before the sixth and all of the others."""

    def row(method: str, layers: int) -> float:
        full = replace(BF16, recompute="full")
        chosen = replace(full, recompute_method=method, recompute_layers=layers)
        return stage_memory(QWEN3_30B, Mesh(), 0, chosen, Rows(4096, 4096, 1)).row - 8 * 4096

    one = 2 * 2048 * 4096
    whole = layer_bytes(QWEN3_30B, Mesh(), Rows(4096, 4096, 1), BF16, moe=True).kept
    assert row("uniform", 1) == row("block", 48) == 48 * one
    assert row("uniform", 4) == 12 * one
    assert row("uniform", 5) == 10 * one
    assert row("block", 6) == pytest.approx(6 * one + 42 * whole)


def test_settings_choose_what_is_planned() -> None:
    run = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1", "algo.policy.name=gspo"]

    def chosen(*overrides: str) -> Choices:
        return choices_of(load_config([], [*run, *overrides]))

    assert chosen() == Choices()
    assert chosen("recompute={granularity: selective, modules: [moe]}") == Choices(
        recompute="selective", recompute_modules=("moe",)
    )
    assert chosen("recompute={granularity: full, method: block, num_layers: 3}") == Choices(
        recompute="full", recompute_method="block", recompute_layers=3
    )
    assert chosen("precision.grad_reduce_dtype=bf16").gradient_bytes == 2
    assert chosen("optim.distributed=false", "precision.dtype=fp32") == Choices(
        dtype="fp32", distributed_optimizer=False
    )
    assert chosen("optim.cpu_offload={fraction: 0.5}").offloaded == 0.5
    aware = "{main_params_dtype: fp16, exp_avg_dtype: fp8, exp_avg_sq_dtype: bf16}"
    assert chosen(f"optim.precision_aware={aware}").optimizer_bytes == 2 + 1 + 2


def test_a_critic_is_a_second_model_without_the_output_head() -> None:
    mesh = Mesh(pp=2, dp=2)
    for stage in (0, 1):
        found = stage_memory(QWEN3_8B, mesh, stage, BF16, Rows(4096, 4096, 4), critic=True)
        n = found.count.shared - (151936 * 4096 - 4096 if stage else 0)
        assert found.critic == n * (2 + 4 + 12 / 2)


def test_frozen_prediction_layers_have_weights_and_nothing_else() -> None:
    mesh = Mesh(pp=61, dp=1)
    with_mtp, without = (
        stage_memory(spec, mesh, 60, BF16, Rows(4096, 4096, 1))
        for spec in (DEEPSEEK_V3, replace(DEEPSEEK_V3, mtp_layers=0))
    )
    assert with_mtp.parameters - without.parameters > 2 * 11.5e9
    assert (with_mtp.gradients, with_mtp.optimizer) == (without.gradients, without.optimizer)


def test_traffic_by_hand() -> None:
    """A dense model: b H t times 5 gathers or scatters in attention and as many in the MLP."""
    sent = {
        x.axis: x
        for x in step_traffic(QWEN3_8B, Mesh(tp=8, pp=2, dp=2, etp=8), BF16, Rows(4096, 4096, 6))
    }
    hidden = 2 * 4096 * 4096
    assert sent["tp"].num_bytes == 6 * 18 * 10 * hidden * 7 / 8 and sent["tp"].in_node
    assert sent["pp"].num_bytes == 6 * 2 * hidden / 8 and not sent["pp"].in_node
    assert sent["ep"].num_bytes == sent["cp"].num_bytes == 0
    moved = (
        6
        * stage_memory(
            QWEN3_8B, Mesh(tp=8, pp=2, dp=2, etp=8), 0, BF16, Rows(4096, 4096, 6)
        ).count.trained
    )
    assert sent["dp"].num_bytes == pytest.approx(moved / 2, rel=1e-3)


@pytest.mark.parametrize("experts, dtype", [(8, np.uint8), (256, np.uint8), (300, np.uint16)])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2, vpp=2, dp=2), Mesh(pp=3, tp=2)], ids=str)
def test_rollout_bytes_are_those_that_the_exchange_cuts(
    mesh: Mesh, experts: int, dtype: type
) -> None:
    rng = np.random.default_rng(0)
    moe = (False, *(True,) * 11)
    spec = replace(QWEN3_30B, experts=experts, topk=4, layers=12, moe_layers=moe, moe_ffn=8)

    def routed(tokens: int) -> np.ndarray:
        ids = [rng.choice(experts, 4, replace=False) for _ in range(11 * (tokens - 1))]
        return np.array(ids, dtype).reshape(tokens - 1, 11, 4)

    samples = [replace(s, routing=routed(len(s.tokens))) for s in random_samples(2, 3, seed=5)]
    dp_ranks = [i % mesh.dp for i in range(len(samples))]
    of_stage = [
        [i - 1 for k in range(mesh.vpp) for i in mesh.layers_of(12, r, k) if moe[i]]
        for r in range(mesh.pp)
    ]
    facts, everywhere = [s.facts for s in samples], [EVERY_RANK] * len(samples)
    moves = Moves(mesh, [0] * mesh.world_size, of_stage, facts, everywhere, dp_ranks)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        lengths = [len(s.tokens) for s, dp in zip(samples, dp_ranks, strict=True) if dp == at.dp]
        used = moves.used_by(rank)
        plain = moves.num_bytes(piece for piece in used if piece.field != "routing")
        assert rollout_bytes(spec, mesh, at.pp, lengths, routing=False) == plain
        assert rollout_bytes(spec, mesh, at.pp, lengths, routing=True) == moves.num_bytes(used)
