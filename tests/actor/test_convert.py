"""The converters: exact both ways; a damaged folder is refused by name, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.fp8_export import fp8_export
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model, wide
from tests.helpers.fp8_blocks import edit_config, quantised, raw_header
from tests.helpers.tools import tool as load_tool

pytestmark = pytest.mark.dist


def convert(pool: WorkerPool, tool: str, source: Path, out: Path, **options: object) -> str | None:
    given = {"tool": tool, "source": source, "out": out, **options}
    (error,) = pool.run("tests.actor.work:convert", world=1, **given)
    return error


def test_there_and_back_is_the_same_model_bit_for_bit(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(pool, "convert_hf_to_megatron", tiny_model, megatron) is None
    assert convert(pool, "convert_megatron_to_hf", megatron, back) is None
    first, second = (load_file(p / "model.safetensors") for p in (tiny_model, back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (back / name).read_bytes() == (tiny_model / name).read_bytes()


FAMILIES = ("qwen3 yarn tied", "deepseek_v3", "glm4_moe without qk norm", "gpt_oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_there_and_back_is_the_same_model_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    """In bf16, with biases of the experts' choice in fp32."""
    model = save_model(name, tmp_path / "model", torch.bfloat16)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(pool, "convert_hf_to_megatron", model, megatron) is None
    assert convert(pool, "convert_megatron_to_hf", megatron, back) is None
    first, second = (load_file(p / "model.safetensors") for p in (model, back))
    assert first.keys() == second.keys()
    for tensor, expected in first.items():
        assert second[tensor].dtype == expected.dtype, tensor
        assert torch.equal(second[tensor], expected), tensor
    assert (back / "config.json").read_bytes() == (model / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["qwen3_moe tied", "deepseek_v3"])
def test_fp8_blocks_come_back_as_their_values(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    source = save_model(name, tmp_path / "source", torch.float32)
    model, values = quantised(source, tmp_path / "model")
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(pool, "convert_hf_to_megatron", model, megatron) is None
    assert convert(pool, "convert_megatron_to_hf", megatron, back) is None
    found = load_file(back / "model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[tensor], values[tensor]) for tensor in found)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize(
    ("name", "scales", "exclude"),
    [
        ("deepseek_v3", "f32", []),
        ("glm4_moe without qk norm", "power_of_two", ["model.layers.0", "o_proj"]),
        ("qwen3_moe tied", "f32", ["mlp.experts"]),
        ("llama biases tied", "power_of_two", []),
    ],
)
def test_an_export_in_fp8_is_the_folder_quantised_file_for_file(
    pool: WorkerPool, tmp_path: Path, name: str, scales: str, exclude: list[str]
) -> None:
    model = save_model(name, tmp_path / "model", torch.bfloat16, **wide(name))
    (model / "tokenizer.json").write_text("{}")
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    assert convert(pool, "convert_hf_to_megatron", model, megatron) is None
    options = {"fp8": scales, "exclude": exclude}
    assert convert(pool, "convert_megatron_to_hf", megatron, out, **options) is None
    load_tool("quantize_hf_fp8").quantize(model, tmp_path / "direct", scales, exclude)
    found, expected = files(out), files(tmp_path / "direct")
    assert found == expected and found.keys() == files(model).keys()


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_family_without_fp8_is_not_exported_in_it(pool: WorkerPool, tmp_path: Path) -> None:
    model = save_model("gpt_oss", tmp_path / "model", torch.bfloat16)
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    assert convert(pool, "convert_hf_to_megatron", model, megatron) is None
    error = convert(pool, "convert_megatron_to_hf", megatron, out, fp8="f32")
    assert error is not None and "family gpt_oss is not written in FP8" in error
    assert not out.exists()


def test_an_export_under_another_config_json_is_refused(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    assert convert(pool, "convert_hf_to_megatron", tiny_model, megatron) is None
    edit_config(megatron / "hf", rms_norm_eps=0.125)
    error = convert(pool, "convert_megatron_to_hf", megatron, out)
    assert error is not None and "norm_eps: 1e-06 in" in error and "0.125 in" in error
    assert not out.exists()


LAYOUTS = [  # and the layers of every chunk of every rank
    ({"dp": 2, "ep": 2}, [[[0, 1, 2, 3]]] * 2),
    ({"tp": 2}, [[[0, 1, 2, 3]]] * 2),
    ({"pp": 2}, [[[0, 1]], [[2, 3]]]),
    ({"pp": 2, "vpp": 2}, [[[0], [2]], [[1], [3]]]),
    ({"pp": 2, "first_layers": 1}, [[[0]], [[1, 2, 3]]]),
    ({"cp": 2, "ep": 2}, [[[0, 1, 2, 3]]] * 2),
]


@pytest.mark.parametrize(("layout", "layers"), LAYOUTS, ids=str)
def test_a_trainer_exports_what_it_was_given_bit_for_bit(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], layers: list[list[list[int]]]
) -> None:
    world = mesh_of(layout).world_size
    ranks = pool.run("tests.actor.work:exported", world=world, hf=tiny_model, layout=layout)
    assert [r["layers"] for r in ranks] == layers
    mesh = mesh_of(layout)
    assert [[layer for chunk in chunks for layer in chunk] for chunks in layers] == [
        [
            layer
            for chunk in range(mesh.vpp)
            for layer in mesh.layers_of(4, mesh.coordinates(rank).pp, chunk)
        ]
        for rank in range(world)
    ]
    names = [n for r in ranks for n in r["tensors"]]
    given = load_file(tiny_model / "model.safetensors")
    assert sorted(names) == sorted(given)  # each once
    assert all(torch.equal(t, given[n]) for r in ranks for n, t in r["tensors"].items())


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
def test_what_a_trainer_sends_has_the_codes_of_a_folder(
    pool: WorkerPool, tmp_path: Path, scales: str
) -> None:
    """Tensors of two ranks' shards, one after another, against the folder that the tool writes."""
    name = "qwen3_moe tied"
    model = save_model(name, tmp_path / "model", torch.bfloat16, **wide(name))
    load_tool("quantize_hf_fp8").quantize(model, tmp_path / "fp8", scales)
    fp8 = fp8_export(mapping_for(read_spec(model)), scales)
    options = {"hf": model, "layout": {"tp": 2}, "precision": {"dtype": "bf16"}}
    sent = {}
    for rank in pool.run("tests.actor.work:exported", world=2, **options):
        for hf, tensor in rank["tensors"].items():
            for part, values in fp8.parts(hf, tensor):
                sent[part] = values.flatten().view(torch.uint8).numpy().tobytes()
    written = raw_header(tmp_path / "fp8" / "model.safetensors")
    assert sent == {n: raw for n, (_, _, raw) in written.items()}


def without_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")


def with_a_stranger(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.9.mlp.gate.weight"] = torch.zeros(8, 64)
    save_file(tensors, model / "model.safetensors")


def cut_short(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_tensor, "missing model.layers.2.mlp.experts.5.up_proj.weight [40, 64]"),
        (with_a_stranger, "not part of the model: model.layers.9.mlp.gate.weight"),
        (cut_short, "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_and_leaves_nothing(
    pool: WorkerPool,
    tiny_model: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    damage(model)
    error = convert(pool, "convert_hf_to_megatron", model, out)
    assert error is not None and error.startswith("DataError") and named in error, error
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_existing_checkpoint_is_never_overwritten(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    error = convert(pool, "convert_hf_to_megatron", tiny_model, tmp_path / "out")
    assert error is not None and "already exists" in error
