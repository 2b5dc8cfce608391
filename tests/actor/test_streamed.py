"""Weights that were streamed into a distributed checkpoint: where Megatron looks for them, and bit
for bit what a model has that was filled from the same folder.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.sharded import megatron_mapping, parameter_names, place_of
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import MODELS, save_model

pytestmark = pytest.mark.dist

EXPERTS = [name for name in MODELS if not name.startswith("qwen3 ") and name != "qwen3"]
LAYOUTS = [
    ({}, list(MODELS)),
    ({"pp": 2}, list(MODELS)),
    ({"tp": 2, "etp": 1}, list(MODELS)),
    ({"dp": 2, "ep": 2}, EXPERTS),
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
