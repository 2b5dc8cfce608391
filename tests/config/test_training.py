"""Optimizers, schedules, recomputation, overlap and experts: what is refused before a start."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.hardware import hardware_problems
from megarl.config.layout import Dims
from megarl.config.load import dump_given, load_config
from megarl.config.schema import Config
from megarl.config.training import training_problems
from megarl.config.unused import unused_settings
from megarl.installed import Installed

BASE = ["run.dir=/r", "run.steps=10", "model.hf=/m", "optim.lr=1", "algo.policy.name=gspo"]
BASE += ["data.prompts=/p", "parallel={dp: 2}", "algo.minibatches=2"]
MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_intermediate_size": 8,
    "vocab_size": 24,
}
MIXED = {**MOE, "mlp_only_layers": [0], "intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 8}
LATENT = {**MOE, "kv_lora_rank": 4}
NOTHING = Installed((), False, False, False, False, False)
EVERYTHING = Installed((2, 20), True, True, True, True, True)


def config(*overrides: str) -> Config:
    return load_config([], [*BASE, *overrides])


def found(problems: Any) -> dict[str, str]:
    return {p.key: f"{p.found} | {p.accepted}" for p in problems}


@pytest.mark.parametrize(
    "overrides, hf, key, words",
    [
        (["optim.name=muon"], MOE, "optim.distributed", "keeps its matrices whole"),
        (["optim.cpu_offload={}", "optim.distributed=false"], MOE, "optim.distributed", "state"),
        (["optim.precision_aware={}", "optim.distributed=false"], MOE, "optim.distributed", "true"),
        (["optim.schedule.weight_decay=linear"], MOE, "optim.schedule.end_weight_decay", "nothing"),
        (["optim.weight_decay=0.2", "optim.schedule={weight_decay: cosine, end_weight_decay: 0.1}"],
         MOE, "optim.schedule.end_weight_decay", "0.1 | a number >= optim.weight_decay = 0.2"),
        (["optim.warmup_steps=20", "optim.schedule.lr=cosine"], MOE, "optim.warmup_steps", "20"),
        (["overlap.param_gather=true"], MOE, "overlap.grad_reduce", "gathers what it has reduced"),
        (["recompute={granularity: selective, modules: [mlp]}"], MOE, "recompute.modules",
         "every layer has experts"),
        (["recompute={granularity: selective, modules: [moe, shared_experts]}"], MOE,
         "recompute.modules", "shared_experts | modules that the model has"),
        (["recompute={granularity: selective, modules: [mla_up_proj]}"], MOE, "recompute.modules",
         "no latent attention"),
        (["recompute={granularity: selective, modules: []}"], MOE, "recompute.modules", "at least"),
        (["recompute={granularity: full, num_layers: 5}", "parallel={pp: 2}"], MOE,
         "recompute.num_layers", "5 | at most the 4 layers"),
        (["recompute={granularity: full, num_layers: 7}", "parallel={pp: 2, first_layers: 2}"],
         MOE, "recompute.num_layers", "7 | at most the 6 layers"),
        (["recompute={granularity: full, num_layers: 4}",
          "parallel={pp: 2, vpp: 2, first_layers: 6, last_layers: 2}"],
         MOE, "recompute.num_layers", "4 | at most the 3 layers"),
        (["moe.routing_replay=old_logprobs", "algo.old_logprobs=rollout"], MOE,
         "moe.routing_replay", "algo.old_logprobs=rollout | none, rollout, or"),
        (["moe={routing_replay: rollout, router_fusion: true}"], MOE, "moe.router_fusion",
         "its choice is fixed (moe.routing_replay=rollout)"),
        (["moe={routing_replay: old_logprobs, router_bias_update_rate: 0.001}"], MOE,
         "moe.router_bias_update_rate", "0.001 | 0: a choice that is replayed says nothing"),
        (["moe={routing_replay: rollout, router_bias_update_rate: 0.5}"], MOE,
         "moe.router_bias_update_rate", "(moe.routing_replay=rollout)"),
        (["overlap.moe_shared_expert=true"], MOE, "overlap.moe_shared_expert", "no shared"),
        (["overlap.moe_shared_expert=true", "moe.token_dispatcher=allgather"], SHARED,
         "moe.token_dispatcher", "alltoall or flex"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(
    overrides: list[str], hf: dict[str, Any], key: str, words: str
) -> None:
    problems = found(training_problems(config(*overrides), Dims.of(hf)))
    assert list(problems) == [key]
    assert words in problems[key]


@pytest.mark.parametrize(
    "overrides, hf",
    [
        ([], MOE),
        (["optim.name=muon", "optim.distributed=false", "optim.muon.momentum=0.9"], MOE),
        (["optim.cpu_offload={}", "optim.precision_aware={exp_avg_dtype: bf16}"], MOE),
        (["optim.warmup_steps=19", "optim.schedule.lr=cosine"], MOE),
        (["overlap={grad_reduce: true, param_gather: true}"], MOE),
        (["recompute={granularity: selective, modules: [core_attn, mlp, moe]}"], MIXED),
        (["recompute={granularity: selective, modules: [mla_up_proj]}"], LATENT),
        (["recompute={granularity: full, method: block, num_layers: 4}", "parallel={pp: 2}"], MOE),
        (["recompute={granularity: full, num_layers: 5}", "parallel={pp: 2, last_layers: 3}"], MOE),
        (["overlap.moe_shared_expert=true"], SHARED),
        (["moe.routing_replay=old_logprobs"], MOE),
        (["moe={routing_replay: rollout, aux_loss_coeff: 0.1}"], MOE),
        (["moe.routing_replay=rollout", "algo.old_logprobs=rollout"], MOE),
        (["moe={routing_replay: none, router_bias_update_rate: 0.1}"], MOE),
    ],
)
def test_what_fits_together_is_no_problem(overrides: list[str], hf: dict[str, Any]) -> None:
    assert found(training_problems(config(*overrides), Dims.of(hf))) == {}
    assert found(unused_settings(config(*overrides), 8)) == {}


@pytest.mark.parametrize(
    "overrides, key, words",
    [
        (["optim.name=muon"], "optim.name", "emerging-optimizers"),
        (["optim.precision_aware={}"], "optim.precision_aware", "Transformer Engine 2.1 or newer"),
        (["optim.cpu_offload={}"], "optim.cpu_offload", "no GPU whose memory"),
        (["moe.token_dispatcher=flex"], "moe.token_dispatcher", "deep_ep"),
        (["moe={token_dispatcher: flex, flex_backend: hybridep}"], "moe.token_dispatcher",
         "deep_ep with hybrid_ep"),
        (["moe.permute_fusion=true"], "moe.permute_fusion",
         "Engine 2.1 or newer (no GPU, it is not"),
        (["moe.router_fusion=true"], "moe.router_fusion", "Transformer Engine 2.7"),
        (["moe.grouped_gemm=true"], "moe.grouped_gemm", "Transformer Engine"),
        (["train.gradient_accumulation_fusion=always"], "train.gradient_accumulation_fusion",
         "fused_weight_gradient_mlp_cuda"),
        (["recompute={granularity: selective, modules: [layernorm]}"], "recompute.modules",
         "Transformer Engine"),
        (["train.transformer_impl=transformer_engine"], "train.transformer_impl",
         "auto, local, or GPUs and Transformer Engine 2.20 or newer (no GPU, it is not installed)"),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_named(overrides: list[str], key: str, words: str) -> None:
    problems = found(hardware_problems(config(*overrides), 0, NOTHING))
    assert list(problems) == [key]
    assert words in problems[key]
    assert found(hardware_problems(config(*overrides), 8, EVERYTHING)) == {}


@pytest.mark.parametrize(
    "setting", ["train.transformer_impl=transformer_engine", "moe.grouped_gemm=true"]
)
def test_transformer_engine_needs_a_gpu_where_it_is_installed(setting: str) -> None:
    key = setting.partition("=")[0]
    assert (
        "(no GPU, 2.20 is installed)"
        in found(hardware_problems(config(setting), 0, EVERYTHING))[key]
    )
    without_te = replace(EVERYTHING, transformer_engine=())
    assert "(it is not installed)" in found(hardware_problems(config(setting), 8, without_te))[key]


@pytest.mark.parametrize(
    "impl, backend, accepted",
    [
        ("local", "te", "auto, transformer_engine: precision.fp8.backend=te is in these"),
        (
            "transformer_engine",
            "emulated",
            "auto, local: precision.fp8.backend=emulated is in these",
        ),
    ],
)
def test_fp8_is_computed_by_layers_of_one_kind(impl: str, backend: str, accepted: str) -> None:
    fp8 = f"precision.fp8={{backend: {backend}}}"
    key = "train.transformer_impl"
    problems = found(training_problems(config(f"{key}={impl}", fp8), None))
    assert problems == {key: f"{impl} | {accepted}"}
    for other in {"auto", "local", "transformer_engine"} - {impl}:
        assert found(training_problems(config(f"{key}={other}", fp8), None)) == {}


@pytest.mark.parametrize("impl", ["auto", "local"])
def test_other_layers_need_nothing(impl: str) -> None:
    asked = config(f"train.transformer_impl={impl}")
    assert found(hardware_problems(asked, 0, NOTHING)) == {}


def test_an_older_version_is_named_with_what_is_there() -> None:
    older = replace(EVERYTHING, transformer_engine=(2, 3))
    problems = found(hardware_problems(config("moe.router_fusion=true"), 8, older))
    assert "(2.3 is installed)" in problems["moe.router_fusion"]
    assert found(hardware_problems(config("moe.permute_fusion=true"), 8, older)) == {}


@pytest.mark.parametrize(
    "overrides, experts, key",
    [
        (["optim.schedule.lr=cosine", "optim.decay_fraction=0.5"], 8, "optim.decay_fraction"),
        (["optim.schedule={lr: linear, wsd_decay: cosine}"], 8, "optim.schedule.wsd_decay"),
        (["optim.schedule.wsd_decay=cosine"], 8, "optim.schedule.wsd_decay"),
        (["optim.schedule.lr=constant", "optim.min_lr_ratio=0.5"], 8, "optim.min_lr_ratio"),
        (["optim.schedule.end_weight_decay=1"], 8, "optim.schedule.end_weight_decay"),
        (["optim.muon.nesterov=true"], 8, "optim.muon.nesterov"),
        (["precision={dtype: fp32, grad_reduce_dtype: bf16}"], 8, "precision.grad_reduce_dtype"),
        (["recompute.modules=[moe]"], 8, "recompute.modules"),
        (["recompute={granularity: full, modules: [moe]}"], 8, "recompute.modules"),
        (["recompute={granularity: selective, method: block}"], 8, "recompute.method"),
        (["recompute.num_layers=2"], 8, "recompute.num_layers"),
        (["overlap.grad_reduce=true", "parallel={dp: 1, tp: 2}"], 8, "overlap.grad_reduce"),
        (["overlap.param_gather=true", "optim.distributed=false"], 8, "overlap.param_gather"),
        (["overlap.param_gather=true", "algo.minibatches=1"], 8, "overlap.param_gather"),
        (["moe.router_dtype=fp64"], 0, "moe.router_dtype"),
        (["moe.routing_replay=rollout"], 0, "moe.routing_replay"),
        (["moe.aux_loss_coeff=0.1"], 0, "moe.aux_loss_coeff"),
        (["moe.token_dispatcher=allgather"], 0, "moe.token_dispatcher"),
        (["overlap.moe_shared_expert=true"], 0, "overlap.moe_shared_expert"),
        (["moe.flex_backend=hybridep"], 8, "moe.flex_backend"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_named(overrides: list[str], experts: int, key: str) -> None:
    problems = found(unused_settings(config(*overrides), experts))
    assert list(problems) == [key] and "has no effect" in problems[key]


def test_another_optimizer_keeps_the_settings_that_both_have(tmp_path: Any) -> None:
    """Unlike a choice whose name decides which settings there are."""
    first = tmp_path / "a.yaml"
    first.write_text("optim: {lr: 0.5, name: adam, weight_decay: 0.1}\n")
    second = tmp_path / "b.yaml"
    second.write_text("optim: {name: muon, distributed: false}\n")
    rest = [x for x in BASE if not x.startswith("optim")]
    loaded = load_config([first, second], rest)
    assert (loaded.optim.lr, loaded.optim.weight_decay, loaded.optim.name) == (0.5, 0.1, "muon")
    third = tmp_path / "c.yaml"
    third.write_text(dump_given(loaded))
    assert load_config([third], []) == loaded
    assert "name" not in dump_given(config()).split("optim:")[1].split("parallel")[0]


def test_a_module_that_is_none_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"recompute.modules\[0\].*core_atn.*core_attn, layernorm"):
        config("recompute={granularity: selective, modules: [core_atn]}")
