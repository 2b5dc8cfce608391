"""Field case D8: experts keep their numbers through every layout."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.checkpoint.inspect import compare
from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.export import export
from tests.helpers.families import save_model

pytestmark = pytest.mark.dist

LAYOUTS = [
    {"dp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "etp": 2},
    pytest.param({"dp": 4, "ep": 4, "etp": 1}, marks=pytest.mark.slow),
    pytest.param({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts of either spelling on disk hold their layer and number: gate, up and down apart."""
    folders = {}
    for name in ("qwen3_moe yarn", "deepseek_v3"):
        hf = save_model(name, tmp_path_factory.mktemp("hf") / "m")
        tensors = load_file(hf / "model.safetensors")
        for key, tensor in tensors.items():
            if ".experts." in key:
                tensor.fill_(number(key))
        save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
        folders[name] = hf
    return folders


def number(key: str) -> float:
    parts = key.split(".")
    layer, expert, kind = int(parts[2]), int(parts[5]), parts[6]
    return 100 * layer + expert + {"gate_proj": 0.25, "up_proj": 0.5, "down_proj": 0.75}[kind]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_k_is_expert_k_whoever_held_it(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    paths = {name: tmp_path / f"saved {name}" for name in models}
    for path in paths.values():
        path.mkdir()
    world = mesh_of(layout).world_size
    work = "tests.actor.work_streamed:save"
    pool.run(work, world=world, layout=layout, models=models, paths=paths)
    for name, hf in models.items():
        spec = read_spec(hf)
        export(paths[name], tmp_path / name, spec, hf)
        found = load_file(tmp_path / name / "model.safetensors")
        experts = {key: t for key, t in found.items() if ".experts." in key}
        layers = sum(spec.moe_layers) + spec.mtp_layers
        assert len(experts) == layers * spec.experts * 3
        for key, tensor in experts.items():
            assert (tensor == number(key)).all(), key
        (streamed := tmp_path / f"streamed {name}").mkdir()
        write_weights(streamed, open_checkpoint(hf), spec)
        assert not compare(paths[name], streamed)
