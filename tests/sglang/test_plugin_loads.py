"""SGLang's own loaders of every family that megarl trains: what each takes, leaves, and needs to
get in one call. Without a server: loads.py builds the models and loads tensors of whole folders.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers.families import save_model, wide
from tests.helpers.tools import tool
from tests.sglang.server import HERE, PLUGIN, SUPPORT, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

JUNK = "model.layers.0.mlp.junk.weight"
MOE = {"mlp_only_layers": []}
UNKNOWN = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Of DeepSeek's files; transformers has no such keys.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3 yarn tied": {},
    "qwen3_moe yarn": MOE,
    "llama biases tied": {},
    "mistral": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "gpt_oss": {},
}


class Loads:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = os.pathsep.join([str(SUPPORT), str(PLUGIN)])
        env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        python = require_sglang() / "bin" / "python"
        self._process = subprocess.Popen(
            [python, HERE / "loads.py"],
            env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "loads.log").open("w"),
            text=True,
        )

    def model(self, name: str, dtype: torch.dtype, **options: Any) -> Path:
        label = re.sub(r"\W+", "_", f"{name} {dtype} {sorted(options)}")  # SGLang globs in it
        folder = self.folder / label
        if not folder.exists():
            save_model(name, folder, dtype, **options)
            if name.startswith("deepseek"):
                file = folder / "config.json"
                file.write_text(json.dumps({**json.loads(file.read_text()), **UNKNOWN}))
        return folder

    def ask(self, model: Path, **calls: list[list[str]]) -> dict[str, dict[str, list[str]]]:
        backend = "triton" if "gpt_oss" in model.name else "torch_native"
        request = json.dumps({"model": str(model), "backend": backend, "ask": calls})
        assert self._process.stdin is not None and self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, (self.folder / "loads.log").read_text()[-3000:]
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loads]:
    loads = Loads(tmp_path_factory.mktemp("loads"))
    yield loads
    loads.close()


def names_of(model: Path) -> list[str]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def is_mtp(name: str) -> bool:
    return name.startswith("model.layers.4.")  # of four layers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_a_folder_is_taken_and_every_parameter_written(
    loads: Loads, family: str
) -> None:
    """But layers for multi-token prediction, which a server without a draft model has no use for;
    and none that it does not know is passed over in silence.
    """
    model = loads.model(family, torch.float32, **FAMILIES[family])
    names = names_of(model)
    own = {name for name in names if not is_mtp(name)}
    assert (own != set(names)) == (family in ("deepseek_v3", "glm4_moe"))
    told = loads.ask(model, whole=[names], junk=[[JUNK, *names]], short=[names[:-1]])
    assert told["whole"] == {"taken": sorted(own), "dropped": [], "unwritten": []}
    assert told["junk"] == {"taken": sorted(own), "dropped": [JUNK], "unwritten": []}
    assert told["short"] == {
        "taken": sorted(own - {names[-1]}),
        "dropped": [],
        "unwritten": ["model.norm.weight"],
    }


def test_deepseek_takes_two_names_only_in_one_call(loads: Loads) -> None:
    """It loads queries' and keys' first projection together, and forgets one that comes alone."""
    model = loads.model("deepseek_v3", torch.float32)
    names = names_of(model)
    pair = [n for n in names if "layers.2." in n and ("q_a_proj" in n or "kv_a_proj" in n)]
    rest = [n for n in names if n not in pair]
    assert len(pair) == 2
    told = loads.ask(
        model, apart=[rest, pair[:1], pair[1:]], together=[pair, rest], twice=[pair[:1], pair, rest]
    )
    assert told["apart"]["dropped"] == sorted(pair)
    assert told["apart"]["unwritten"] == [
        "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa.weight"
    ]
    assert told["together"]["dropped"] == told["twice"]["dropped"] == []


def test_what_sglang_has_no_place_for_in_a_model_is_told_by_name(loads: Loads) -> None:
    """Its Qwen3-MoE has experts in every layer, and a head of its own where the folder's is tied:
    the server's answers would be those of random weights.
    """
    model = loads.model("qwen3_moe tied", torch.float32)
    told = loads.ask(model, whole=[names_of(model)])["whole"]
    dense = [f"model.layers.1.mlp.{x}_proj.weight" for x in ("down", "gate", "up")]
    assert told["dropped"] == dense
    experts = [f"model.layers.1.mlp.{x}" for x in ("experts.w13_weight", "experts.w2_weight")]
    assert told["unwritten"] == [*experts, "model.layers.1.mlp.gate.weight", "lm_head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_codes_and_scales_of_fp8_are_taken(loads: Loads, family: str, scales: str) -> None:
    """Not by Llama's loader, which gives every scale a name that no parameter has."""
    plain = loads.model(family, torch.bfloat16, **{**wide(family), **FAMILIES[family]})
    folder = loads.folder / f"{plain.name}_{scales}"
    tool("quantize_hf_fp8").quantize(plain, folder, scales, [])
    names = names_of(folder)
    told = loads.ask(folder, whole=[names], single=[[name] for name in names])
    scale_names = [name for name in names if name.endswith("_scale_inv") and not is_mtp(name)]
    assert len(scale_names) > 20
    lost = scale_names if family.startswith(("llama", "mistral")) else []
    assert told["whole"]["dropped"] == lost
    pairs = [n for n in names if family == "deepseek_v3" and ("q_a_proj" in n or "kv_a_proj" in n)]
    assert told["single"]["dropped"] == sorted([*lost, *(n for n in pairs if not is_mtp(n))])
