"""precision.fp8: what it cannot be combined with, and what it needs of the machine."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.fp8 import contradictions, row_alignment, set_te_environment
from megarl.config.fp8_rules import fp8_hardware, fp8_problems
from megarl.config.hardware import hardware_problems
from megarl.config.layout import Dims, layout_problems
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.config.unused import unused_settings
from megarl.errors import Problem
from megarl.installed import Gpu, Installed
from megarl.mesh import Mesh

BASE = ["run={dir: /r, steps: 10}", "model.hf=/m", "optim.lr=1", "algo.policy.name=gspo"]
BASE += ["data.prompts=/p", "parallel={dp: 2}"]
CRITIC = ["algo.advantage.name=gae", "critic.lr=1"]
HF = {
    **{"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"num_hidden_layers": 8, "vocab_size": 512, "intermediate_size": 64},
}
DIMS = Dims.of(HF)
H100 = Installed((2, 20), *[False] * 5, gpu=Gpu((9, 0), (13, 0)))


def config(*overrides: str) -> Config:
    return load_config([], [*BASE, *overrides])


def found(problems: Iterable[Problem]) -> dict[str, str]:
    return {p.key: f"{p.found} | {p.accepted}" for p in problems}


@pytest.mark.parametrize(
    "overrides, key, words",
    [
        (["precision={dtype: fp32, fp8: {}}"], "precision.dtype", "fp32 | bf16, or precision.fp8"),
        (["precision={dtype: fp32, fp8: {backend: emulated}}"], "precision.dtype", "fp32 | bf16"),
        (["precision.fp8={recipe: delayed, first_layers_bf16: 1}"],
         "precision.fp8.first_layers_bf16", "1 | 0, or another recipe"),
        (["precision.fp8={recipe: delayed, backend: emulated, last_layers_bf16: 3}"],
         "precision.fp8.last_layers_bf16", "3 | 0, or another recipe"),
        (["precision.fp8={recipe: delayed}",
          "recompute={granularity: selective, modules: [layernorm]}"],
         "recompute.modules", "layernorm | other modules, or another recipe than delayed"),
        (["precision.fp8={first_layers_bf16: 8}"], "precision.fp8.first_layers_bf16",
         "8 | fewer than num_hidden_layers = 8"),
        (["precision.fp8={first_layers_bf16: 3, last_layers_bf16: 6}"],
         "precision.fp8.first_layers_bf16 and precision.fp8.last_layers_bf16", "3 + 6 | fewer"),
        (["precision.fp8.last_layers_bf16=3", "parallel={pp: 4, dp: 1}"],
         "precision.fp8.last_layers_bf16", "3 | at most the 2 layers of a pipeline stage"),
        ([*CRITIC, "precision.fp8.last_layers_bf16=3", "critic.parallel={pp: 4}"],
         "precision.fp8.last_layers_bf16", "at most the 2 layers of a pipeline stage of the crit"),
        (["precision.fp8.param_gather=true", "optim.distributed=false"], "optim.distributed",
         "false | true: precision.fp8.param_gather gathers"),
        ([*CRITIC, "precision.fp8.param_gather=true", "critic.optim.distributed=false"],
         "critic.optim.distributed", "false | true"),
        (["precision.fp8.param_gather=true", "optim.cpu_offload={}"], "optim.cpu_offload",
         "null, or precision.fp8.recipe=delayed"),
        (["precision.fp8.param_gather=true", "memory.offload=idle"], "memory.offload",
         "idle | none"),
        (["precision.fp8={recipe: mxfp8, param_gather: true}", "algo.minibatches=2",
          "overlap={grad_reduce: true, param_gather: true}"], "overlap.param_gather",
         "true | false: with mxfp8"),
        (["precision.fp8.backend=emulated", "train.gradient_accumulation_fusion=always"],
         "train.gradient_accumulation_fusion", "always | auto, never"),
        (["precision.fp8.param_gather=true", "model.load=/c"], "model.load", "/c | null"),
        ([*CRITIC, "precision.fp8.param_gather=true", "critic.load=/c"], "critic.load", "null"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(overrides: list[str], key: str, words: str) -> None:
    problems = found(fp8_problems(config(*overrides), DIMS))
    assert list(problems) == [key]
    assert words in problems[key]


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision.dtype=fp32"],
        *(["precision.fp8.recipe=" + x] for x in ("tensorwise", "delayed", "blockwise", "mxfp8")),
        *([f"precision.fp8={{recipe: {x}, format: hybrid}}"] for x in ("blockwise", "mxfp8")),
        ["precision.fp8={first_layers_bf16: 2, last_layers_bf16: 2}", "parallel={pp: 4, dp: 1}"],
        ["precision.fp8={first_layers_bf16: 3, last_layers_bf16: 4}"],
        ["precision.fp8={backend: emulated, first_layers_bf16: 7}", "parallel={pp: 4, dp: 1}"],
        ["precision.fp8.param_gather=true", "overlap={grad_reduce: true, param_gather: true}"],
        ["precision.fp8={recipe: delayed, param_gather: true}", "optim.cpu_offload={}"],
        ["precision.fp8={recipe: mxfp8, param_gather: true}"],
        [*CRITIC, "precision.fp8.param_gather=true"],
        ["precision.fp8={recipe: tensorwise}",
         "recompute={granularity: selective, modules: [layernorm]}"],
    ],
    ids=str,
)  # fmt: skip
def test_what_fits_together_is_no_problem(overrides: list[str]) -> None:
    assert found(fp8_problems(config("algo.minibatches=2", *overrides), DIMS)) == {}


@pytest.mark.parametrize(
    "settings, names",
    [
        ("{recipe: tensorwise, scales: f32}", ["scales"]),
        ("{recipe: mxfp8, scales: power_of_two}", ["scales"]),
        ("{recipe: delayed, scales: f32}", ["scales"]),
        ("{amax_history: 8}", ["amax_history"]),
        ("{recipe: tensorwise, amax_algo: most_recent, margin: 2}", ["amax_algo", "margin"]),
        ("{recipe: delayed, amax_algo: most_recent, amax_history: 4}", ["amax_history"]),
        ("{backend: emulated, param_gather: true}", ["param_gather"]),
        ("{recipe: delayed, amax_history: 8, amax_algo: max, margin: 2}", []),
        ("{backend: emulated, param_gather: false, scales: power_of_two}", []),
        ("{param_gather: true, scales: f32, first_layers_bf16: 1}", []),
    ],
)
def test_a_setting_without_effect_is_named(settings: str, names: list[str]) -> None:
    problems = found(unused_settings(config(f"precision.fp8={settings}"), 0))
    assert list(problems) == [f"precision.fp8.{name}" for name in names]


LACKING: list[tuple[str, Installed, int, str, str]] = [
    ("{}", replace(H100, transformer_engine=()), 8, "precision.fp8.backend",
     "te | emulated, or Transformer Engine 2.20 or newer (it is not installed)"),
    ("{}", replace(H100, transformer_engine=(2, 19)), 8, "precision.fp8.backend",
     "2.20 or newer (2.19 is installed)"),
    ("{}", replace(H100, engine_fault="built for another"), 8, "precision.fp8.backend",
     "built for another"),
    ("{}", replace(H100, gpu=None), 0, "precision.fp8.backend", "9.0 or higher, with CUDA 12.9"),
    ("{}", replace(H100, gpu=Gpu((8, 9), (13, 0))), 8, "precision.fp8.recipe",
     "blockwise | tensorwise, delayed here (the GPUs here have compute capability 8.9)"),
    ("{}", replace(H100, gpu=Gpu((9, 0), (12, 8))), 8, "precision.fp8.recipe",
     "blockwise | tensorwise, delayed here (torch is built for CUDA 12.8)"),
    ("{recipe: tensorwise}", replace(H100, gpu=Gpu((8, 0), (13, 0))), 8, "precision.fp8.recipe",
     "no recipe runs"),
    ("{recipe: mxfp8}", H100, 8, "precision.fp8.recipe",
     "mxfp8 | tensorwise, delayed, blockwise here"),
    ("{recipe: mxfp8}", replace(H100, gpu=Gpu((12, 0), (13, 0))), 8, "precision.fp8.recipe",
     "compute capability 12.0"),
    *(("{scales: f32}", replace(H100, gpu=Gpu(capability, (13, 0))), 8, "precision.fp8.scales",
       "f32 | power_of_two, on GPUs of compute capability 1")
      for capability in ((10, 0), (10, 3), (12, 0))),
    ("{}", replace(H100, engine_switches={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}), 8,
     "environment variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0 | not set, or 1"),
    ("{scales: power_of_two}",
     replace(H100, engine_switches={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}), 8,
     "environment variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1 | not set, or 0"),
    ("{recipe: tensorwise}",
     replace(H100, engine_switches={"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}), 8,
     "environment variable NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1 | not set, or 0"),
    *((f"{{recipe: {recipe}}}",
       replace(H100, engine_switches={"NVTE_BACKWARD_OVERRIDE": "high_precision"}), 8,
       "environment variable NVTE_BACKWARD_OVERRIDE", "high_precision | not set: precision.fp8")
      for recipe in ("delayed", "tensorwise", "blockwise")),
]  # fmt: skip


@pytest.mark.parametrize("settings, machine, gpus, key, words", LACKING)
def test_what_the_machine_lacks_is_named(
    settings: str, machine: Installed, gpus: int, key: str, words: str
) -> None:
    problems = found(fp8_hardware(config(f"precision.fp8={settings}"), gpus, machine))
    assert list(problems) == [key]
    assert words in problems[key]


def test_what_the_machine_lacks_is_looked_for_with_the_rest() -> None:
    without = Installed((), *[False] * 5)
    problems = found(hardware_problems(config("precision.fp8={}"), 0, without))
    assert list(problems) == ["precision.fp8.backend"]


@pytest.mark.parametrize(
    "settings, machine, gpus",
    [
        *(("{recipe: " + x + "}", H100, 1) for x in ("tensorwise", "delayed", "blockwise")),
        *(
            ("{recipe: " + x + "}", replace(H100, gpu=Gpu((10, 0), (13, 0))), 8)
            for x in ("tensorwise", "delayed", "blockwise, scales: power_of_two", "mxfp8")
        ),
        ("{recipe: mxfp8}", replace(H100, gpu=Gpu((10, 3), (12, 8))), 8),
        ("{backend: emulated}", Installed((), *[False] * 5), 0),
        ("{backend: emulated}", replace(H100, engine_switches={"NVTE_BACKWARD_OVERRIDE": "x"}), 8),
        ("{}", replace(H100, engine_switches={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}), 8),
        ("{recipe: tensorwise}",
         replace(H100, engine_switches={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}), 8),
    ],
)  # fmt: skip
def test_what_is_there_is_no_problem(settings: str, machine: Installed, gpus: int) -> None:
    assert found(fp8_hardware(config(f"precision.fp8={settings}"), gpus, machine)) == {}


@pytest.mark.parametrize(
    "settings, name, value",
    [
        ("{}", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"),
        ("{scales: power_of_two}", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0"),
        ("{recipe: tensorwise}", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0"),
        ("{recipe: delayed}", None, ""),
        ("{backend: emulated}", None, ""),
    ],
)
def test_the_form_of_scales_is_set_before_it_is_read(
    settings: str, name: str | None, value: str
) -> None:
    section = config(f"precision.fp8={settings}").precision.fp8
    environment = {"PATH": "/bin"}
    set_te_environment(section, environment)
    assert environment == {"PATH": "/bin", **({} if name is None else {name: value})}
    assert contradictions(section, environment) == {}
    set_te_environment(None, environment)


RUN = """
import os, sys, types
from megarl import train

def run(*_):
    set_to = os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    print(set_to, [name for name in ("megatron", "transformer_engine") if name in sys.modules])

train.check = lambda config, job: None  # of a machine with GPUs
sys.modules["megarl.loop"] = types.SimpleNamespace(run=run)
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_run_sets_it_before_anything_of_megatron_is_imported(tmp_path: Path) -> None:
    given = [*BASE, f"run.dir={tmp_path}/run", "precision.fp8.scales=f32"]
    command = [sys.executable, "-c", RUN, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 []\n", done.stderr


# --- rows -----------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, int]] = [
    *({}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"tp": 8}, {"cp": 3}, {"tp": 3, "cp": 2}),
]


@pytest.mark.parametrize("align", [1, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_divides_by_what_every_axis_and_the_recipe_need(
    layout: dict[str, int], align: int
) -> None:
    """The least number that does, by trying all."""
    mesh = Mesh(**layout, align=align)

    def fits(tokens: int) -> bool:
        chunks = 2 * mesh.cp if mesh.cp > 1 else 1
        whole = tokens % (chunks * mesh.tp) == 0
        share = tokens // (mesh.cp * mesh.tp)
        return whole and share * mesh.cp * mesh.tp == tokens and share % align == 0

    assert mesh.row_multiple == next(n for n in range(1, 10**4) if fits(n))
    assert mesh.segment_multiple == Mesh(**layout).segment_multiple


@pytest.mark.parametrize(
    "settings, align",
    [("null", 1), ("{backend: emulated}", 1), ("{backend: emulated, recipe: mxfp8}", 1),
     ("{}", 16), ("{recipe: tensorwise}", 16), ("{recipe: delayed}", 16), ("{recipe: mxfp8}", 32)],
)  # fmt: skip
def test_the_recipe_decides_the_alignment(settings: str, align: int) -> None:
    assert row_alignment(config(f"precision.fp8={settings}").precision.fp8) == align


@pytest.mark.parametrize(
    "layout, settings, row, wanted",
    [
        ("{dp: 2}", "{}", 4100, "a multiple of 16 (cp 1 * tp 1 * 16 tokens"),
        ("{tp: 2}", "{recipe: mxfp8}", 4160, None),
        ("{tp: 2}", "{recipe: mxfp8}", 4112, "a multiple of 64 (cp 1 * tp 2 * 32 tokens"),
        ("{cp: 2}", "{}", 4112, "a multiple of 32"),
        ("{tp: 2, cp: 2}", "{}", 4160, None),
        ("{cp: 2}", "{backend: emulated}", 4100, None),
    ],
)
def test_the_token_budget_of_a_row_is_such_a_multiple(
    layout: str, settings: str, row: int, wanted: str | None
) -> None:
    given = config(f"parallel={layout}", f"precision.fp8={settings}", f"train.row_tokens={row}")
    problems: dict[str, Any] = found(layout_problems(given, None, HF))
    assert list(problems) == ([] if wanted is None else ["train.row_tokens"])
    assert wanted is None or wanted in problems["train.row_tokens"]
