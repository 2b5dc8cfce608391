"""What of every family tools/quantize_hf_fp8.py writes in FP8, by the bytes of the files: the kinds
of tensors, sizes that servers do not take in blocks, exclusions.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.hf_complete import check_complete, open_model
from megarl.models.spec import read_spec
from tests.helpers.families import MODELS, save_model, wide
from tests.helpers.fp8_blocks import raw_header
from tests.tools.conftest import Quantize

DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} | {
    "gate_proj",
    "up_proj",
    "down_proj",
}
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
ENDS = {"embed_tokens", "lm_head"}
LATENT_NORMS = {"q_a_layernorm", "kv_a_layernorm"}
MTP = {"enorm", "hnorm", "eh_proj", "head"}
BIASES = {f"{x}_proj.bias" for x in "qkv"}
FAMILIES = {  # name -> last parts of modules in codes, and of what is not
    "qwen3": (DENSE, {*NORMS, *ENDS, "q_norm", "k_norm"}),
    "qwen3 yarn tied": (DENSE, {*NORMS, "embed_tokens", "q_norm", "k_norm"}),
    "qwen3_moe yarn": (DENSE, {*NORMS, *ENDS, "q_norm", "k_norm", "gate"}),
    "qwen3_moe tied": (DENSE, {*NORMS, "embed_tokens", "q_norm", "k_norm", "gate"}),
    "deepseek_v3": (
        LATENT,
        {*NORMS, *ENDS, *LATENT_NORMS, *MTP, "gate", "gate.e_score_correction_bias"},
    ),
    "deepseek_v3 direct queries": (
        LATENT - {"q_a_proj", "q_b_proj"} | {"q_proj"},
        {*NORMS, *ENDS, "kv_a_layernorm", "gate", "gate.e_score_correction_bias"},
    ),
    "kimi_k2": (LATENT, {*NORMS, *ENDS, *LATENT_NORMS, "gate", "gate.e_score_correction_bias"}),
    "glm4_moe": (
        DENSE,
        {*NORMS, *ENDS, *MTP, *BIASES, "q_norm", "k_norm", "gate", "gate.e_score_correction_bias"},
    ),
    "glm4_moe without qk norm": (
        DENSE,
        {*NORMS, *ENDS, *MTP, *BIASES, "gate", "gate.e_score_correction_bias"},
    ),
    "qwen2": (DENSE, {*NORMS, *ENDS, *BIASES}),
    "qwen2 windows tied": (DENSE, {*NORMS, "embed_tokens", *BIASES}),
    "llama": (DENSE, {*NORMS, *ENDS}),
    "llama biases tied": (DENSE, {*NORMS, "embed_tokens", *BIASES, "o_proj.bias"}),
    "mistral": (DENSE, {*NORMS, *ENDS}),
}
REFUSED = {"gpt_oss", "gpt_oss without yarn"}
ROUTERS = [f"model.layers.{i}.mlp.gate" for i in (1, 2, 3)]
HEADS = {  # name -> modules_to_not_convert
    "qwen3": ["lm_head"],
    "llama biases tied": None,
    "qwen3_moe yarn": [*(f"model.layers.{i}.mlp.gate" for i in (0, 2, 3)), "lm_head"],
    "deepseek_v3": [
        *ROUTERS,
        "model.layers.4.mlp.gate",
        "model.layers.4.eh_proj",
        "lm_head",
        "model.layers.4.shared_head.head",
    ],
}


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_of_a_family_is_in_codes(quantize: Quantize, tmp_path: Path, name: str) -> None:
    source = save_model(name, tmp_path / "source", torch.bfloat16, **wide(name))
    assert quantize(source, tmp_path / "out") is None
    before, after = (raw_header(f / "model.safetensors") for f in (source, tmp_path / "out"))
    found: tuple[set[str], set[str]] = set(), set()
    for tensor, (dtype, shape, raw) in before.items():
        its_dtype, its_shape, its_raw = after.pop(tensor)
        assert its_shape == shape, tensor
        in_codes = its_dtype == "F8_E4M3"
        found[not in_codes].add(last_part(tensor))
        if in_codes:
            grid = [-(-n // 128) for n in shape]
            assert after.pop(f"{tensor}_scale_inv")[:2] == ("F32", grid)
        else:
            assert (its_dtype, its_raw) == (dtype, raw), tensor
    assert found == FAMILIES[name] and not after
    out = tmp_path / "out"
    if name in HEADS:
        assert quantization(out).get("modules_to_not_convert") == HEADS[name]
    spec = read_spec(out)
    assert not spec.differences(read_spec(source)) and spec.dtype == "bfloat16"
    check_complete(open_model(out, spec), spec)


def last_part(tensor: str) -> str:
    """A module's, or with what it has beside a weight."""
    *_, module, kind = tensor.split(".")
    return module if kind == "weight" else f"{module}.{kind}"


def test_every_family_is_spoken_of() -> None:
    assert FAMILIES.keys() | REFUSED == MODELS.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_stacked_experts_are_refused(quantize: Quantize, tmp_path: Path, name: str) -> None:
    source = save_model(name, tmp_path / "source", torch.bfloat16, **wide(name))
    said = quantize(source, tmp_path / "out")
    assert said is not None and "family gpt_oss is not written in FP8: files hold its exp" in said
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("shards", ["5GB", "600KB"])
def test_fused_experts_are_written_one_by_one_as_servers_read_them(
    quantize: Quantize, moe: Path, tmp_path: Path, shards: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.bfloat16)
    fused, out = tmp_path / "fused", tmp_path / "out"
    model.save_pretrained(fused, save_original_format=False, max_shard_size=shards)
    (fused / "config.json").write_bytes((moe / "config.json").read_bytes())
    files = list(fused.glob("*.safetensors"))
    names = {name for file in files for name in raw_header(file)}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names and (len(files) > 1) == (
        shards == "600KB"
    )
    assert quantize(moe, tmp_path / "expected") is None
    assert quantize(fused, out) is None
    found = {n: t for file in out.glob("*.safetensors") for n, t in raw_header(file).items()}
    assert found == raw_header(tmp_path / "expected" / "model.safetensors")
    assert quantization(out) == quantization(tmp_path / "expected")


# ---- sizes ---------------------------------------------------------------------------------------

EVERY = "model.layers.*."
SIZES = [  # model, options, modules that stay plain beside those of HEADS
    ("llama", {"num_key_value_heads": 2}, ["q_proj", "k_proj", "v_proj"]),  # k: 64 rows
    ("llama", {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 48}, []),
    ("llama", {"intermediate_size": 320}, ["gate_proj", "up_proj", "down_proj"]),
    ("llama", {"intermediate_size": 192}, ["gate_proj", "up_proj", "down_proj"]),
    ("qwen3_moe yarn", {"moe_intermediate_size": 64}, ["experts"]),
    (
        "qwen3_moe yarn",
        {"intermediate_size": 200},
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    ),
    ("deepseek_v3", {"q_lora_rank": 96}, ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"]),
    ("deepseek_v3", {"kv_lora_rank": 192}, ["kv_b_proj"]),
    ("deepseek_v3", {"v_head_dim": 40}, ["o_proj"]),
    ("deepseek_v3", {"qk_nope_head_dim": 17}, []),  # q_b: 100 rows, alone
    ("deepseek_v3 direct queries", {"qk_nope_head_dim": 17}, []),
    (
        "deepseek_v3",
        {"moe_intermediate_size": 64},  # shared experts have twice that
        ["mlp.experts"],
    ),
]


@pytest.mark.parametrize(("name", "options", "plain"), SIZES, ids=str)
def test_what_a_server_would_not_take_in_blocks_stays_plain(
    quantize: Quantize, tmp_path: Path, name: str, options: dict[str, int], plain: list[str]
) -> None:
    source = save_model(name, tmp_path / "source", **{**wide(name), **options})
    assert quantize(source, tmp_path / "out") is None
    listed = quantization(tmp_path / "out")["modules_to_not_convert"]
    extra = {m for m in listed if not m.endswith(("gate", "lm_head", "eh_proj", ".head"))}
    names = {n.rpartition(".")[0] for n in raw_header(source / "model.safetensors")}
    expected = {m for m in names if any(f".{m}".endswith(f".{p}") for p in plain)}
    if any("experts" in p for p in plain):
        expected = {m.rpartition(".experts.")[0] + ".experts" for m in names if ".experts." in m}
    draft = {f"model.decoder.{m[15:]}" for m in expected if m.startswith("model.layers.4.")}
    assert extra == expected | draft and (plain == []) == (extra == set())
    out = raw_header(tmp_path / "out" / "model.safetensors")
    in_codes = {n.rpartition(".")[0] for n, (dtype, *_) in out.items() if dtype == "F8_E4M3"}
    assert in_codes and not any(f"{m}.".startswith(f"{p}.") for m in in_codes for p in listed)


def test_a_model_without_whole_blocks_is_refused(
    quantize: Quantize, tiny_model: Path, tmp_path: Path
) -> None:
    said = quantize(tiny_model, tmp_path / "out")
    assert said is not None and "no linear has whole blocks of 128 x 128, as [40, 64]" in said
    assert not list(tmp_path.iterdir())


# ---- exclusions ----------------------------------------------------------------------------------

EXPERTS = "model.layers.2.mlp.experts"
EXCLUDED = [
    (["model.layers.2"], 4 + 8 * 3, [f"model.layers.2.self_attn.{x}_proj" for x in "qkvo"]),
    (["o_proj"], 4, [f"model.layers.{i}.self_attn.o_proj" for i in range(4)]),
    (["mlp.experts"], 3 * 8 * 3, [f"model.layers.{i}.mlp.experts" for i in (0, 2, 3)]),
    ([EXPERTS, "model.layers.1.mlp"], 8 * 3 + 3, [EXPERTS, "model.layers.1.mlp.down_proj"]),
    (["q_proj", "k_proj", "v_proj"], 3 * 4, [f"model.layers.3.self_attn.{x}_proj" for x in "qkv"]),
]


@pytest.mark.parametrize(("exclude", "count", "listed"), EXCLUDED, ids=str)
def test_excluded_modules_stay_plain(
    quantize: Quantize, moe: Path, tmp_path: Path, exclude: list[str], count: int, listed: list[str]
) -> None:
    assert quantize(moe, tmp_path / "all") is None
    assert quantize(moe, tmp_path / "out", "--exclude", *exclude) is None
    everything, some = (raw_header(tmp_path / x / "model.safetensors") for x in ("all", "out"))
    dropped = {n for n in everything if n not in some}  # scales
    assert len(dropped) == count
    plain = raw_header(moe / "model.safetensors")
    for name in (n.removesuffix("_scale_inv") for n in dropped):
        assert some[name] == plain[name]
    others = {n for n in everything if f"{n}_scale_inv" not in dropped and n not in dropped}
    assert all(some[n] == everything[n] for n in others)
    assert set(listed) <= set(quantization(tmp_path / "out")["modules_to_not_convert"])


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (["q_proj"], "q_proj: model.layers.0.self_attn.q_proj and model.layers.0.self_attn.k_proj"),
        (
            ["mlp.up_proj"],
            "mlp.up_proj: model.layers.1.mlp.up_proj and model.layers.1.mlp.gate_pro",
        ),
        (["experts.5"], "experts.5: model.layers.0.mlp.experts.5.gate_proj and model.layers.0.mlp"),
        (["lm_head"], "lm_head: names no module that would be in FP8"),
        (["model.layers.2", "model.layers.9"], "model.layers.9: names no module that would be"),
        (["layers.2.mlp.expert"], "layers.2.mlp.expert: names no module that would be in FP8"),
        (["model"], "nothing is left to be written in FP8"),
    ],
)
def test_exclusions_that_cannot_be_are_refused(
    quantize: Quantize, moe: Path, tmp_path: Path, exclude: list[str], said: str
) -> None:
    found = quantize(moe, tmp_path / "out", "--exclude", *exclude)
    assert found is not None and said in found
    assert not list(tmp_path.iterdir())
