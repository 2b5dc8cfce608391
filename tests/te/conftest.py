"""Tests with the real Transformer Engine, on a machine without a GPU: ``make check-te``.

They run in an environment of their own (``tools/setup_te.sh``); in any other they are skipped, but
for ``test_environment.py``, which is how `make test-all` comes by them.

A test has two kinds of worker processes. In those of ``te_pool`` Transformer Engine is visible:
models with ``train.transformer_impl: transformer_engine`` can be built there, loaded, saved and
looked at, their optimizer is FusedAdam, and nothing computes. In those of ``local_pool`` it is
hidden, as in every run on CPUs: models are local, their optimizer is torch's AdamW, and they train.

What a worker does is a function of any module that is not imported here, such as ``actions.py``.
There ``with_actor(use, hf, layout, **sections)`` calls ``use`` with an actor built from settings::

    def recipes(rank: int, hf: Path, layout: Layout, **sections: Any) -> ...:
        return with_actor(lambda actor: look_at(actor.model), hf, layout, **sections)

    found = te_pool.run("tests.te.work_fp8:recipes", world=1, hf=families["qwen3_moe tied"],
                        layout={}, precision={"dtype": "bf16", "fp8": {"recipe": "blockwise"}})

Constructors that keep parameters in FP8 call one kernel, which rounds them: a worker that builds
such a model calls ``rounding.install()`` before, and its matrices need sides that are multiples of
128 (``families.save_model`` takes other dimensions as keywords).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.installed import version
from tests.helpers.dist import WorkerPool
from tests.helpers.families import MODELS, save_model

HERE = Path(__file__).parent
WITH_TE = version("transformer-engine-torch") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark = pytest.mark.skip(reason="needs Transformer Engine: make check-te runs it")
    for item in items:
        mine = item.path.parent == HERE
        outside = item.path.name == "test_environment.py"
        if mine and not outside and not WITH_TE:
            item.add_marker(mark)
        elif mine and outside and WITH_TE:
            item.add_marker(pytest.mark.skip(reason="makes the environment that this is"))


@pytest.fixture(scope="session")
def te_pool() -> Iterator[WorkerPool]:
    """Workers that see Transformer Engine."""
    workers = WorkerPool(first="tests.te.shim")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def local_pool() -> Iterator[WorkerPool]:
    """Workers that do not, as every process of a run on CPUs, which also imports this first."""
    workers = WorkerPool(first="megarl.actor")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every row of the parity table, in bf16."""
    folder = tmp_path_factory.mktemp("families")
    names = enumerate(MODELS)
    return {name: save_model(name, folder / str(i), torch.bfloat16) for i, name in names}
