"""Tiny random models as transformers saves them: the reference for names, shapes and bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megarl.errors import DataError
from megarl.models.dist_metadata import read_metadata
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from tests.helpers import families
from tests.helpers.pickled import PLACES, Refused, metadata

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": EXPERTS,
    "moe_with_dense_layers": {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "moe_every_second_layer": {**EXPERTS, "decoder_sparse_step": 2},
    "moe_tied": {**EXPERTS, "tie_word_embeddings": True},
    "moe_bfloat16": {**EXPERTS, "dtype": "bfloat16"},
    "dense": {},
    "dense_tied": {"tie_word_embeddings": True},
}
IN_BF16 = " in bf16"


def save_tiny(folder: Path, **options: Any) -> Path:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes = {**SIZES, **options}
    dtype = getattr(torch, sizes.pop("dtype", "float32"))
    torch.manual_seed(0)
    model: Any
    if "num_experts" in sizes:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    with torch.no_grad():  # norms are all ones at birth: a swap among them would go unnoticed
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of ``MODELS``, or of ``helpers/families.MODELS``, made once a session.
    Tests must not change it.
    """
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            if name in MODELS:
                folders[name] = save_tiny(folder, **MODELS[name])
            else:  # of families.py: "name" or "name in bf16"
                plain = name.removesuffix(IN_BF16)
                dtype = torch.float32 if plain == name else torch.bfloat16
                folders[name] = families.save_model(plain, folder, dtype)
        return folders[name]

    return get


@pytest.fixture
def sharded(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """The tiny model in several shards, by our own writer."""
    source = saved("moe")
    specs = mapping_for(read_spec(source)).hf_spec()
    out = tmp_path / "sharded"
    write_checkpoint(out, load_file(source / "model.safetensors").items(), specs, source, 20_000)
    return out


# --- distributed checkpoints ----------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "marker"
    monkeypatch.setenv("MEGARL_TEST_MARKER", str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's ``.metadata``, by torch's own writer."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "metadata.json").write_text("{}")
    results = [WriteResult(i, w[2], _StorageInfo(*w)) for i, w in PLACES]
    FileSystemWriter(path).finish(metadata(), [results])
    return path


@pytest.fixture
def refused(folder: Path, marker: Path) -> Iterator[Refused]:
    """What is said of these bytes as ``.metadata``."""

    def refuse(data: bytes) -> str:
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(DataError) as error:
            read_metadata(folder)
        assert not marker.exists()
        assert str(error.value).startswith(str(folder / ".metadata"))
        return str(error.value)

    yield refuse
    assert not marker.exists()
