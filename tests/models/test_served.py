"""The form of weights that servers are sent: against the bytes of folders that the converter wrote,
and by the definition of codes.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.load import load_config
from megarl.errors import ConfigError, DataError, SyncError
from megarl.models.served import Group, ServedForm, served_form
from megarl.models.spec import read_spec
from tests.helpers.families import MODELS, save_model, wide
from tests.helpers.fp8_blocks import BLOCKS, edit_config, raw_header
from tests.helpers.tools import tool
from tests.ops.test_fp8_block import plain_quant

CODES = {"F8_E4M3": "float8_e4m3fn", "F32": "float32", "BF16": "bfloat16"}
FP8 = [name for name, (family, _) in MODELS.items() if family != "gpt_oss"]
SOME = ["qwen3_moe tied", "deepseek_v3", "glm4_moe", "llama biases tied"]
FUSED = re.compile(r"(.+\.self_attn\.)(q_a_proj|kv_a_proj_with_mqa)\.weight(_scale_inv)?")


def form_of(model: Path, served: Path | None = None, *settings: str) -> ServedForm:
    """Of a run's servers that are started from ``served``, whose trainer has ``model``."""
    overrides = ["run.dir=/r", "run.steps=1", f"model.hf={model}", "optim.lr=1"]
    overrides += ["algo.policy.name=gspo", "data.prompts=/p", *settings]
    overrides += [] if served is None else [f"rollout.model={served}"]
    return served_form(load_config([], overrides), read_spec(model))


def in_fp8(source: Path, out: Path, scales: str, exclude: list[str] | None = None) -> Path:
    tool("quantize_hf_fp8").quantize(source, out, scales, exclude or [])
    return out


def quantization(folder: Path, **changes: Any) -> None:
    """Changes in config.json; None: the key goes."""
    config = json.loads((folder / "config.json").read_text())
    value = {**config["quantization_config"], **changes}
    edit_config(folder, quantization_config={k: v for k, v in value.items() if v is not None})


def source_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def as_bytes(groups: Iterator[Group]) -> dict[str, tuple[str, list[int], bytes]]:
    """As ``raw_header`` has a file's."""
    names = {dtype: code for code, dtype in CODES.items()}
    found = {}
    for group in groups:
        for name, tensor in group:
            assert name not in found
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            dtype = names[str(tensor.dtype).removeprefix("torch.")]
            found[name] = (dtype, list(tensor.shape), raw)
    return found


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SOME else pytest.mark.slow) for n in FP8]
)
def test_what_is_sent_is_what_the_converter_writes(tmp_path: Path, name: str, scales: str) -> None:
    """Bit for bit, every tensor; and so are the names, shapes and dtypes that are announced."""
    source = save_model(name, tmp_path / "source", torch.bfloat16, **wide(name))
    out = in_fp8(source, tmp_path / "out", scales)
    written = raw_header(out / "model.safetensors")
    form = form_of(source, out)
    assert as_bytes(form.groups(source_of(source).items())) == written
    announced = {s.name: (s.dtype, list(s.shape)) for s in form.specs}
    expected = {n: (CODES[dtype], shape) for n, (dtype, shape, _) in written.items()}
    assert announced == expected and len(form.specs) == len(expected)
    assert sum(dtype == "F8_E4M3" for dtype, *_ in written.values()) > 10


def test_modules_that_a_folder_has_plain_stay_plain(tmp_path: Path) -> None:
    source = save_model("qwen3_moe tied", tmp_path / "source", **wide("qwen3_moe tied"))
    out = in_fp8(source, tmp_path / "out", "f32", ["model.layers.2.mlp.experts", "o_proj"])
    written = raw_header(out / "model.safetensors")
    assert written["model.layers.2.mlp.experts.3.up_proj.weight"][0] == "F32"
    assert as_bytes(form_of(source, out).groups(source_of(source).items())) == written
    listed = json.loads((out / "config.json").read_text())["quantization_config"]
    names = listed["modules_to_not_convert"]
    quantization(out, modules_to_not_convert=None, ignored_layers=names)  # the other spelling
    assert as_bytes(form_of(source, out).groups(source_of(source).items())) == written


def test_a_published_config_that_lists_nothing_has_all_linears_in_codes(tmp_path: Path) -> None:
    """DeepSeek-V3's: routers, embeddings and heads are never in codes, listed or not."""
    source = save_model("deepseek_v3", tmp_path / "source", **wide("deepseek_v3"))
    out = in_fp8(source, tmp_path / "out", "f32")
    listing = form_of(source, out)
    quantization(out, modules_to_not_convert=None)
    assert form_of(source, out) == listing


def wide_form(name: str, tmp_path: Path) -> tuple[dict[str, Tensor], ServedForm]:
    source = save_model(name, tmp_path / "source", torch.bfloat16, **wide(name))
    edit_config(source, quantization_config=BLOCKS)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        file.unlink()  # which a trainer of servers elsewhere may lack
    return tensors, form_of(source)


def test_what_a_loader_makes_one_of_comes_together(tmp_path: Path) -> None:
    tensors, form = wide_form("deepseek_v3", tmp_path)
    pairs = set()
    for group in form.groups(tensors.items()):
        names = [name for name, _ in group]
        weights = [n for n in names if not n.endswith("_scale_inv")]
        scaled = [n for n, t in group if t.dtype == torch.float8_e4m3fn]
        assert sorted(names) == sorted([*weights, *(f"{n}_scale_inv" for n in scaled)])
        fused = [FUSED.fullmatch(n) for n in names]
        if any(fused):
            assert all(fused) and len(names) == 4, names
            pairs |= {m[1] for m in fused if m}
        else:
            assert len(weights) == 1
    assert pairs == {f"model.layers.{i}.self_attn." for i in range(5)}  # the last predicts two on


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n][0] not in ("deepseek_v3",)])
def test_no_other_family_has_tensors_that_must_come_together(tmp_path: Path, name: str) -> None:
    """But for Kimi-K2, which is DeepSeek's."""
    form = form_of(save_model(name, tmp_path / "source"))
    pairs = {tuple(names) for names in form.together.values()}
    if name != "kimi_k2":
        assert not pairs
        return
    at = "model.layers.{}.self_attn.{}.weight"
    kinds = ("q_a_proj", "kv_a_proj_with_mqa")
    assert pairs == {tuple(at.format(i, k) for k in kinds) for i in range(4)}


def test_direct_queries_are_fused_with_nothing(tmp_path: Path) -> None:
    form = form_of(save_model("deepseek_v3 direct queries", tmp_path / "source"))
    assert not form.together


def test_a_group_that_is_not_whole_at_the_end_is_named(tmp_path: Path) -> None:
    tensors, form = wide_form("deepseek_v3", tmp_path)
    gone = "model.layers.3.self_attn.q_a_proj.weight"
    kept = {n: t for n, t in tensors.items() if n != gone}
    with pytest.raises(SyncError, match=rf"3\.self_attn\.kv_a_proj_with_mqa.* without {gone}"):
        list(form.groups(kept.items()))


def test_a_tensor_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    tensors, form = wide_form("qwen3", tmp_path)
    name, tensor = next(iter(tensors.items()))
    for wrong in ("model.nothing", f"{name}_scale_inv"):
        with pytest.raises(SyncError, match=f"{wrong} is not a weight"):
            list(form.groups([(wrong, tensor)]))


def test_a_weight_without_codes_is_named(tmp_path: Path) -> None:
    tensors, form = wide_form("qwen3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    with pytest.raises(DataError, match=rf"{name} has no FP8 codes: .*nan at \[3, 5\]"):
        list(form.groups(tensors.items()))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_plain_tensors_take_the_servers_dtype_but_for_what_is_kept_in_fp32(
    tmp_path: Path, stored: str
) -> None:
    source = save_model("glm4_moe", tmp_path / "source")
    served = save_model("glm4_moe", tmp_path / "served", getattr(torch, stored))
    tensors = source_of(source)
    groups = form_of(source, served).groups(tensors.items())
    found = dict(part for group in groups for part in group)
    assert found.keys() == tensors.keys()
    kept = {n for n in tensors if n.endswith("e_score_correction_bias")}
    assert len(kept) == 4
    for name, tensor in tensors.items():
        dtype = torch.float32 if name in kept else getattr(torch, stored)
        assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


def test_plain_tensors_of_a_folder_in_fp8_take_its_dtype(tmp_path: Path) -> None:
    source = save_model("glm4_moe", tmp_path / "source", **wide("glm4_moe"))
    plain = save_model("glm4_moe", tmp_path / "plain", torch.bfloat16, **wide("glm4_moe"))
    served = in_fp8(plain, tmp_path / "served", "f32")
    form = form_of(source, served)
    found = {s.name: s.dtype for s in form.specs}
    expected = raw_header(served / "model.safetensors")
    assert found == {n: CODES[dtype] for n, (dtype, *_) in expected.items()}
    assert set(found.values()) == set(CODES.values())
    sent = dict(part for group in form.groups(source_of(source).items()) for part in group)
    assert {n: str(t.dtype).removeprefix("torch.") for n, t in sent.items()} == found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_servers_of_the_trainers_own_folder_have_the_trainers_precision(
    tmp_path: Path, precision: str
) -> None:
    form = form_of(save_model("qwen3", tmp_path / "source"), None, f"precision.dtype={precision}")
    assert {s.dtype for s in form.specs} == {{"fp32": "float32", "bf16": "bfloat16"}[precision]}


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
def test_codes_are_of_what_the_trainer_has_and_not_of_what_it_would_be_in_bf16(
    tmp_path: Path, scales: str
) -> None:
    _, form = wide_form("qwen3", tmp_path)
    form = form_of(tmp_path / "source", None, f"sync.fp8={scales}")
    name = "model.layers.1.mlp.up_proj.weight"
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(2))
    ((codes, its_scales),) = ([t for _, t in g] for g in form.groups([(name, weight)]))
    pairs = [
        plain_quant(w.float().numpy(), 128, 128, 0.0, scales == "power_of_two")
        for w in (weight, weight.bfloat16())
    ]
    assert np.array_equal(codes.view(torch.uint8).numpy(), pairs[0][0])
    assert np.array_equal(its_scales.numpy(), pairs[0][1])
    assert not np.array_equal(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize(
    ("stored", "setting", "scales"),
    [
        (None, "auto", "f32"),
        (None, "f32", "f32"),
        (None, "power_of_two", "power_of_two"),
        ("float", "auto", "f32"),
        ("ue8m0", "auto", "power_of_two"),
        ("ue8m0", "power_of_two", "power_of_two"),
    ],
)
def test_scales_are_the_folders_where_it_says_and_else_the_settings(
    tmp_path: Path, stored: str | None, setting: str, scales: str
) -> None:
    wide_form("qwen3", tmp_path)
    quantization(tmp_path / "source", scale_fmt=stored)
    form = form_of(tmp_path / "source", None, f"sync.fp8={setting}")
    assert form.fp8 is not None and form.fp8.scales == scales
    said = form.fp8.config().get("scale_fmt")
    assert said == ("ue8m0" if scales == "power_of_two" else None)


# ---- folders that no server could hold so --------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modules_to_not_convert": ["layers.2.self_attn.q_proj"]},
         r"layers\.2\.self_attn\.q_proj and model\.layers\.2\.self_attn\.k_proj are one module"),
        ({"modules_to_not_convert": ["layers.2.mlp.experts.5"]},
         r"experts\.5\.gate_proj and model\.layers\.2\.mlp\.experts\.0\.gate_proj are one module"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\].*of \[128, 128\]"),
    ],
)  # fmt: skip
def test_a_form_that_no_server_holds_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    wide_form("qwen3_moe yarn", tmp_path)
    quantization(tmp_path / "source", **changes)
    with pytest.raises(DataError, match=rf"{tmp_path}/source: (.|\n)*{said}"):
        form_of(tmp_path / "source")


def test_matrices_that_are_no_whole_blocks_must_be_said_to_be_plain(tmp_path: Path) -> None:
    source = save_model("qwen3_moe yarn", tmp_path / "source")
    (source / "model.safetensors").unlink()
    edit_config(source, quantization_config=BLOCKS)
    with pytest.raises(DataError) as caught:
        form_of(source)
    said = str(caught.value).splitlines()
    assert "model.layers.0.self_attn.o_proj.weight [32, 48]" in str(caught.value)
    assert len(said) - 1 == 4 * 3 + 1  # qkv, o and experts of each layer; one has gate_up and down


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.3.self_attn.o_proj", r"1 not listed in config\.json, but plain: .*3\.self"),
        ("model.layers.0.mlp.gate", r"1 in FP8, which no server takes so: .*0\.mlp\.gate"),
    ],
)
def test_files_that_hold_another_form_than_config_json_says_are_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    source = save_model("qwen3_moe yarn", tmp_path / "source", **wide("qwen3_moe yarn"))
    out = in_fp8(source, tmp_path / "out", "f32")
    tensors, weight = source_of(out), f"{name}.weight"
    tensors.pop(f"{weight}_scale_inv", None)
    if tensors[weight].dtype == torch.float32:
        tensors[weight] = torch.zeros(tensors[weight].shape).to(torch.float8_e4m3fn)
        tensors[f"{weight}_scale_inv"] = torch.ones(1, 1)
        quantization(out, modules_to_not_convert=["lm_head"])
    else:
        tensors[weight] = torch.zeros(tensors[weight].shape)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(DataError, match=said):
        form_of(source, out)


def test_another_model_is_refused_with_everything_in_which_it_is_another(tmp_path: Path) -> None:
    source = save_model("qwen3_moe yarn", tmp_path / "source")
    other = save_model(
        "qwen3_moe yarn", tmp_path / "other", num_experts_per_tok=3, rms_norm_eps=1e-5,
        intermediate_size=64, eos_token_id=7,
    )  # fmt: skip
    edit_config(other, quantization_config=BLOCKS)
    with pytest.raises(ConfigError) as caught:
        form_of(source, other)
    found = {p.key: (p.found, p.accepted) for p in caught.value.problems}
    assert {key: found for key, (found, _) in found.items()} == {
        "rollout.model: topk": "3",
        "rollout.model: norm_eps": "1e-05",
        "rollout.model: ffn": "64",
        "rollout.model: eos_token_id": "[7]",
    }
    assert found["rollout.model: topk"][1].startswith(f"2, as {source}: servers hold the same")
    assert found["rollout.model: eos_token_id"][1].startswith("[1], as")
