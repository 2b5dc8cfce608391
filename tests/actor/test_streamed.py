"""Weights that were streamed into a distributed checkpoint: where Megatron looks for them, and bit
for bit what a model has that was filled from the same folder.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint.streamed import write_weights
from megarl.errors import DataError
from megarl.models.hf_io import open_checkpoint
from megarl.models.sharded import megatron_mapping, parameter_names, place_of
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.export import export
from tests.helpers.families import MODELS, WITHOUT_EXPERTS, save_model

pytestmark = pytest.mark.dist

LAYOUTS = [
    ({}, list(MODELS)),
    ({"pp": 2}, list(MODELS)),
    ({"tp": 2, "etp": 1}, list(MODELS)),
    ({"dp": 2, "ep": 2}, [n for n in MODELS if n not in WITHOUT_EXPERTS]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In bf16, with biases of the experts' choice in fp32."""
    folder = tmp_path_factory.mktemp("models")
    return {n: save_model(n, folder / str(i), torch.bfloat16) for i, n in enumerate(MODELS)}


@pytest.fixture(scope="module")
def streamed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("streamed") for name in models}
    for name, hf in models.items():
        write_weights(folders[name], open_checkpoint(hf), read_spec(hf))
    return folders


def run(pool: WorkerPool, work: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    world = mesh_of(layout).world_size
    return pool.run(f"tests.actor.work_streamed:{work}", world=world, layout=layout, **arguments)


def test_every_chunk_is_where_megatron_has_it(pool: WorkerPool, models: dict[str, Path]) -> None:
    """Key by key, shape by shape, chunk by chunk, of every family, experts in either spelling."""
    (expected,) = run(pool, "chunks", {}, models=models)
    for name, hf in models.items():
        mapping = megatron_mapping(read_spec(hf))
        places = [place_of(mapping, parameter) for parameter in parameter_names(mapping)]
        found = {
            (place.key, chunk.offsets): (chunk.sizes, place.shape, place.dtype)
            for place in places
            for chunk in place.chunks
        }
        assert found == expected[name], name
        assert len(found) == sum(len(place.chunks) for place in places)
        for spelling in mapping.megatron_names(every_spelling=True):
            assert ".mlp.experts." not in spelling or place_of(mapping, spelling) in places


@pytest.mark.parametrize(("layout", "names"), LAYOUTS, ids=lambda v: str(v)[:40])
def test_a_streamed_checkpoint_is_what_a_model_reads_from_the_folder(
    pool: WorkerPool,
    models: dict[str, Path],
    streamed: dict[str, Path],
    layout: dict[str, int],
    names: list[str],
) -> None:
    chosen = {name: models[name] for name in names}
    for rank in run(pool, "differences", layout, models=chosen, checkpoints=streamed):
        for name, (*other, count) in rank.items():
            assert not other and int(count) > 10, (name, other)


def assert_same_files(back: Path, hf: Path) -> None:
    first, second = (load_file(p / "model.safetensors") for p in (hf, back))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype and torch.equal(second[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_without_a_model(
    models: dict[str, Path], streamed: dict[str, Path], tmp_path: Path, name: str
) -> None:
    hf = models[name]
    export(streamed[name], tmp_path / "back", read_spec(hf), hf)
    assert_same_files(tmp_path / "back", hf)
    assert (tmp_path / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({"tp": 2, "etp": 1}, ["gpt_oss", "qwen3 yarn tied"]),
        ({"tp": 2, "ep": 2, "etp": 1}, ["glm4_moe without qk norm", "qwen3_moe yarn"]),
        ({"tp": 2}, ["deepseek_v3"]),
        ({"pp": 2}, ["deepseek_v3 direct queries"]),
    ],
    ids=str,
)
def test_a_checkpoint_that_upstream_wrote_is_exported_without_a_model(
    pool: WorkerPool,
    models: dict[str, Path],
    tmp_path: Path,
    layout: dict[str, int],
    names: list[str],
) -> None:
    chosen = {name: models[name] for name in names}
    saved = {name: tmp_path / f"saved {name}" for name in names}
    for path in saved.values():
        path.mkdir()
    run(pool, "save", layout, models=chosen, paths=saved)
    for name, hf in chosen.items():
        export(saved[name], tmp_path / name, read_spec(hf), hf)
        assert_same_files(tmp_path / name, hf)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_written(
    models: dict[str, Path], streamed: dict[str, Path], tmp_path: Path
) -> None:
    hf = models["glm4_moe"]
    with pytest.raises(DataError) as error:
        export(streamed["glm4_moe without qk norm"], tmp_path / "back", read_spec(hf), hf)
    assert "missing decoder.layers.0.self_attention.q_layernorm.weight [16]" in str(error.value)
    assert "mlp.shared_experts.linear_fc1.weight: found [40, 32]; the model's is [80, 32]" in str(
        error.value
    )
    with pytest.raises(DataError, match=r"not a Megatron distributed checkpoint"):
        export(hf, tmp_path / "back", read_spec(hf), hf)
    assert not list(tmp_path.iterdir())
