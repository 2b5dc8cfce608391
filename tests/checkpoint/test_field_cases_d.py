"""Field cases of conversion, whole kinds, through the converters' own path: a folder into a
checkpoint and back, without a model. Numbers are of the project's list of field cases.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.checkpoint.stored import StoredWeights
from megarl.checkpoint.streamed import write_weights
from megarl.errors import DataError
from megarl.models.hf_complete import open_model
from megarl.models.hf_io import open_checkpoint
from megarl.models.sharded import megatron_mapping, place_of
from megarl.models.spec import read_spec
from tests.helpers.export import export
from tests.helpers.families import save_model

Tensors = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def there_and_back(hf: Path, folder: Path) -> Tensors:
    """Every tensor of the export, which is the folder's bit for bit."""
    (weights := folder / "weights").mkdir()
    spec = read_spec(hf)
    write_weights(weights, open_model(hf, spec), spec)
    export(weights, folder / "back", spec, hf)
    first, second = (load_file(p / "model.safetensors") for p in (hf, folder / "back"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype, name
        assert torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (folder / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    return second


def edited(hf: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(hf / "model.safetensors")
    change(tensors)
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


def parameter(hf: Path, weights: Path, name: str) -> Tensor:
    """As it lies in the checkpoint."""
    place = place_of(megatron_mapping(read_spec(hf)), name)
    parameter = torch.empty(place.parameter, dtype=getattr(torch, place.dtype))
    StoredWeights(weights).read(place, parameter)
    return parameter


# --- D1: rows that pad the vocabulary -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab"),
    [
        *(("qwen3_moe tied", vocab) for vocab in (1000, 2, 63, 64, 65, 129)),
        *(("gpt_oss", vocab) for vocab in (1000, 1023)),
    ],
)
def test_the_vocabulary_is_padded_with_zeros_and_comes_back_without(
    tmp_path: Path, name: str, vocab: int
) -> None:
    hf = save_model(name, tmp_path / "hf", torch.bfloat16, vocab_size=vocab, num_hidden_layers=2)
    found = there_and_back(hf, tmp_path)
    assert len(found[EMBEDDING]) == vocab
    rows = parameter(hf, tmp_path / "weights", "embedding.word_embeddings.weight")
    assert len(rows) == (vocab + 63) // 64 * 64
    assert torch.equal(rows[:vocab], found[EMBEDDING]) and not rows[vocab:].any()


# --- D2: tied embeddings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_moe yarn", "gpt_oss", "qwen2", "llama", "mistral"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_exported_where_it_is_another_tensor(
    tmp_path: Path, name: str, tied: bool
) -> None:
    hf = save_model(name, tmp_path / "hf", torch.bfloat16, tie_word_embeddings=tied)
    found = there_and_back(hf, tmp_path)
    assert (HEAD in found) is not tied
    assert json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"] is tied
    assert tied or not torch.equal(found[HEAD], found[EMBEDDING])


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", "language_model.model.", "text.model."]
)
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_a_model_inside_another_are_refused_with_every_name(
    tmp_path: Path, prefix: str, tied: bool
) -> None:
    """No tensor is taken for another by the end of its name, and none is left out."""
    hf = save_model("qwen3", tmp_path / "hf", tie_word_embeddings=tied)

    def rename(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    names = [n for n in load_file(hf / "model.safetensors") if n.startswith("model.")]
    with pytest.raises(DataError) as error:
        open_model(edited(hf, rename), read_spec(hf))
    for name in names:
        assert f"missing {name} [" in str(error.value)
        assert f"not part of the model: {prefix}{name.removeprefix('model.')}" in str(error.value)


@pytest.mark.parametrize("name", ["qwen3 yarn tied", "qwen2 windows tied", "gpt_oss without yarn"])
def test_a_head_beside_tied_embeddings_must_equal_them_and_is_not_exported(
    tmp_path: Path, name: str
) -> None:
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)

    def equal(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    def stale(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING] + 0.5

    spec = read_spec(hf)
    (tmp_path / "weights").mkdir()
    write_weights(tmp_path / "weights", open_checkpoint(edited(hf, equal)), spec)
    export(tmp_path / "weights", tmp_path / "back", spec, hf)
    assert HEAD not in load_file(tmp_path / "back" / "model.safetensors")
    (tmp_path / "stale").mkdir()
    with pytest.raises(DataError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        write_weights(tmp_path / "stale", open_checkpoint(edited(hf, stale)), spec)
    assert not list((tmp_path / "stale").iterdir())


# --- D7: query groups -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "heads", "groups"),  # of the last two, with biases
    [
        *(("qwen3", *n) for n in ((8, 2), (8, 1), (6, 3), (4, 4))),
        *(("qwen2", *n) for n in ((8, 2), (12, 2))),
        *(("gpt_oss", *n) for n in ((8, 2), (10, 5))),
    ],
)
def test_every_row_of_attention_is_of_its_head(
    tmp_path: Path, name: str, heads: int, groups: int
) -> None:
    """Rows of query head h hold h, of key head g 100 + g, of value head g 200 + g."""
    size = 6
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size}
    hf = save_model(name, tmp_path / "hf", num_hidden_layers=2, **sizes)

    def fill(tensors: Tensors) -> None:
        for tensor_name, tensor in tensors.items():
            for kind, first in (("q_proj", 0), ("k_proj", 100), ("v_proj", 200)):
                if f".{kind}." in tensor_name:
                    ids = first + torch.arange(len(tensor)).div(size, rounding_mode="floor")
                    tensor.copy_(ids.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))

    there_and_back(edited(hf, fill), tmp_path)
    each = heads // groups
    expected = [
        head
        for g in range(groups)
        for head in [*range(g * each, (g + 1) * each), 100 + g, 200 + g]
        for _ in range(size)
    ]
    for kind in ("weight", *(() if name == "qwen3" else ("bias",))):
        found = parameter(
            hf, tmp_path / "weights", f"decoder.layers.1.self_attention.linear_qkv.{kind}"
        )
        assert found.view(len(expected), -1)[:, 0].tolist() == expected


# --- D11: tensors in float32 beside others --------------------------------------------------------

EXACT = [1.0009765625, -3.0000002384185791, 1e-38, 65504.5, -0.0, 2.0**-149, 0.1, 16777215.0]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe without qk norm", "kimi_k2"])
def test_biases_of_the_experts_choice_keep_every_bit(tmp_path: Path, name: str) -> None:
    """Numbers that bfloat16 has not, the smallest one and a negative zero among them."""
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)

    def fill(tensors: Tensors) -> None:
        for key, tensor in tensors.items():
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(torch.tensor(EXACT))

    found = there_and_back(edited(hf, fill), tmp_path)
    biases = {n: t for n, t in found.items() if n.endswith("e_score_correction_bias")}
    assert len(biases) >= 3
    expected = torch.tensor(EXACT).view(torch.int32).tolist()
    for key, tensor in biases.items():
        assert tensor.dtype == torch.float32
        assert tensor.view(torch.int32).tolist() == expected, key
        assert tensor.tolist() != tensor.bfloat16().float().tolist()


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3 yarn tied"])
def test_a_folder_in_float32_is_rounded_once_where_config_json_says_bfloat16(
    tmp_path: Path, name: str
) -> None:
    hf = save_model(name, tmp_path / "hf", torch.float32)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    spec = read_spec(hf)
    (tmp_path / "weights").mkdir()
    write_weights(tmp_path / "weights", open_model(hf, spec), spec)
    export(tmp_path / "weights", tmp_path / "back", spec, hf)
    found = load_file(tmp_path / "back" / "model.safetensors")
    for key, tensor in load_file(hf / "model.safetensors").items():
        kept = tensor if "correction_bias" in key else tensor.bfloat16()
        assert found[key].dtype == kept.dtype and torch.equal(found[key], kept), key
