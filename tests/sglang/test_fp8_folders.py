"""Folders in FP8, as tools write them, in the real server: it takes every name, shape and dtype,
and its log-probs are those that transformers computes from what codes and scales stand for.

SGLang loads them with its own code; a CPU without AMX multiplies with dequantised weights
(``support/``), which leaves activations unrounded.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import make_tiny_model
from tests.helpers.families import reference_logprobs, save_model, wide
from tests.helpers.fp8_blocks import plain_values, raw_header
from tests.helpers.samples import random_samples
from tests.helpers.tools import tool
from tests.sglang.protocol import PROMPT, ok, prompt_logprobs
from tests.sglang.server import HERE, SUPPORT, SGLangServer, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1500)]
TOLERANCE = 1e-5  # fp32 on both sides, sums in another order
Reference = Callable[[Path, list[int]], dict[str, list]]

SIZES = ("--hidden", "256", "--heads", "4", "--head-dim", "64", "--init-std", "0.1")
CASES = [  # options of make_tiny_model, exclusions, modules that stay plain beside routers and head
    (("--kv-heads", "2", "--moe-ffn", "128"), [], set()),
    (
        ("--kv-heads", "1", "--moe-ffn", "192"),
        ["model.layers.0.self_attn"],
        {f"model.layers.{i}.self_attn.{x}_proj" for i in range(4) for x in "qkv"}
        | {f"model.layers.{i}.mlp.experts" for i in range(4)}
        | {"model.layers.0.self_attn.o_proj"},
    ),
    (
        ("--kv-heads", "4", "--moe-ffn", "256"),
        ["model.layers.2.mlp.experts", "q_proj", "k_proj", "v_proj"],
        {f"model.layers.{i}.self_attn.{x}_proj" for i in range(4) for x in "qkv"}
        | {"model.layers.2.mlp.experts"},
    ),
]


@pytest.mark.parametrize(
    ("options", "exclude", "plain"), CASES, ids=["whole blocks", "other sizes", "excluded"]
)
def test_the_server_loads_a_folder_in_fp8_and_computes_its_values(
    reference: Reference, tmp_path: Path, options: list[str], exclude: list[str], plain: set[str]
) -> None:
    require_sglang()
    folders: dict[str, Path] = {}
    for seed, scales in enumerate(("f32", "power_of_two")):
        source = make_tiny_model(
            tmp_path / f"source_{scales}", *SIZES, *options, "--seed", str(seed)
        )
        folders[scales] = tmp_path / scales
        tool("quantize_hf_fp8").quantize(source, folders[scales], scales, exclude)
    config = json.loads((folders["f32"] / "config.json").read_text())
    listed = set(config["quantization_config"].get("modules_to_not_convert", ()))
    assert {m for m in listed if not m.endswith((".gate", "lm_head"))} == plain
    expected = {
        name: reference(plain_values(folder, tmp_path / f"values_{name}"), PROMPT)["logprobs"]
        for name, folder in folders.items()
    }
    unrounded = reference(tmp_path / "source_f32", PROMPT)["logprobs"]
    assert expected["f32"] != pytest.approx(unrounded, abs=100 * TOLERANCE)

    with SGLangServer(folders["f32"], log_path=tmp_path / "server.log") as server:
        assert prompt_logprobs(server) == pytest.approx(expected["f32"], abs=TOLERANCE)
        ok(server, "/update_weights_from_disk", model_path=str(folders["power_of_two"]))
        assert prompt_logprobs(server) == pytest.approx(expected["power_of_two"], abs=TOLERANCE)


def test_the_server_computes_a_glm_in_fp8(tmp_path: Path) -> None:
    """Biases beside codes, shared experts, a sigmoid router."""
    require_sglang()
    options = {"num_nextn_predict_layers": 0, "max_position_embeddings": 512}
    source = save_model("glm4_moe", tmp_path / "source", **wide("glm4_moe"), **options)
    tool("quantize_hf_fp8").quantize(source, tmp_path / "fp8", "f32")
    (sample,) = random_samples(1, 1)
    sample = replace(sample, tokens=np.array(PROMPT, np.int32))
    values = plain_values(tmp_path / "fp8", tmp_path / "values")
    expected, unrounded = (reference_logprobs(f, [sample])[0] for f in (values, source))
    with SGLangServer(tmp_path / "fp8", log_path=tmp_path / "server.log") as server:
        found = torch.tensor(prompt_logprobs(server), dtype=torch.float64)
    assert (found - expected).abs().max() < TOLERANCE
    assert (unrounded - expected).abs().max() > 100 * TOLERANCE


# ---- which modules are plain, by SGLang's own reading of config.json -----------------------------

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
FUSED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP, "fused_qkv_a_proj_with_mqa": LATENT}
READ: list[tuple[str, dict[str, int], list[str]]] = [
    ("llama", {}, []),
    ("llama", {"num_key_value_heads": 2}, ["model.layers.1"]),
    ("qwen2", {"intermediate_size": 320}, []),
    ("qwen3_moe yarn", {"moe_intermediate_size": 64}, []),
    ("qwen3_moe yarn", {"intermediate_size": 200}, ["model.layers.2.mlp.experts", "o_proj"]),
    ("deepseek_v3", {}, []),
    ("deepseek_v3", {"q_lora_rank": 96}, []),
    ("deepseek_v3", {"moe_intermediate_size": 64}, ["model.layers.4.self_attn", "kv_b_proj"]),
    ("deepseek_v3 direct queries", {"kv_lora_rank": 192}, ["model.layers.2.mlp.shared_experts"]),
    ("glm4_moe", {"num_key_value_heads": 2}, ["model.layers.4.mlp.experts"]),
]


def server_module(weight: str, direct: bool) -> str:
    """What SGLang calls the module that a weight is in."""
    module = weight.removesuffix(".weight").replace("model.layers.4.", "model.decoder.")
    parent, _, part = module.rpartition(".")
    if ".experts." in module:
        return module.partition(".experts.")[0] + ".experts"
    if direct and part in ("q_proj", "kv_a_proj_with_mqa"):
        return module
    fused = next((name for name, parts in FUSED.items() if part in parts), part)
    return f"{parent}.{fused}"


def test_the_server_leaves_exactly_those_modules_plain_that_files_have_plain(
    tmp_path: Path,
) -> None:
    venv = require_sglang()
    asked: list[tuple[object, object, list[str]]] = []
    plain: list[list[bool]] = []
    for i, (name, options, exclude) in enumerate(READ):
        source = save_model(name, tmp_path / f"source_{i}", **{**wide(name), **options})
        tool("quantize_hf_fp8").quantize(source, tmp_path / f"{i}", "f32", exclude)
        modules: dict[str, set[bool]] = {}
        for weight, (dtype, _, _) in raw_header(tmp_path / f"{i}" / "model.safetensors").items():
            if weight.endswith("_proj.weight") and "eh_proj" not in weight:
                module = server_module(weight, "direct" in name)
                modules.setdefault(module, set()).add(dtype != "F8_E4M3")
        assert all(len(kinds) == 1 for kinds in modules.values()), name
        config = json.loads((tmp_path / f"{i}" / "config.json").read_text())
        asked.append((config["quantization_config"], FUSED, list(modules)))
        plain.append([kinds.pop() for kinds in modules.values()])
    done = subprocess.run(
        [venv / "bin" / "python", HERE / "skipped.py"],
        input=json.dumps(asked),
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == plain
    assert {True, False} == {kind for kinds in plain for kind in kinds}
