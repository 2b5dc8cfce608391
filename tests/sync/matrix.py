"""The matrix of pushes, for embedded and SGLang servers: transport x precision x trainer's layout.

What a server must hold is read from a folder that the trainer's weights have never been in: for FP8
the offline converter wrote it. What it must sample is what it samples with that folder's own files,
and what transformers computes from what these stand for.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actor.compare import mesh_of
from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.helpers.families import reference_logprobs
from tests.helpers.fp8_blocks import plain_values
from tests.helpers.samples import random_samples
from tests.helpers.tools import tool
from tests.sync.asked import PROMPT, ask, checksum_of, sampled
from tests.sync.servers import digests_of

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"dp": 2, "ep": 2},
    {"pp": 2},
    {"tp": 2, "dp": 2, "ep": 2},
]
WAYS = ["broadcast", "colocated", "disk"]
PRECISIONS = ["fp32", "bf16", "fp8 f32", "fp8 power_of_two"]
QUICK: list[Any] = [{"dp": 2, "ep": 2}, "fp8 power_of_two", 1]  # the cell that is not slow
SIZES = ("--hidden", "256", "--heads", "8", "--head-dim", "64", "--kv-heads", "4")
MORE = ("--layers", "2", "--moe-ffn", "256", "--init-std", "0.05", "--max-positions", "512")


def slow_but_one(values: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which one is not slow: a cell is slow if anything in it is."""
    return [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in values]


@dataclass(frozen=True)
class Model:
    """``trained``: what a trainer loads; ``served``: the same in the servers' form. ``logprobs`` of
    PROMPT by transformers, of what the latter stands for: f64 [len(PROMPT) - 1].
    """

    trained: Path
    served: Path
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Pair:
    """Two models that differ in every tensor. ``dtype``: of the trainer, and of what servers hold
    that is not in codes. ``tolerance``: of what a server computes in it.
    """

    precision: str
    dtype: str
    old: Model
    new: Model
    tolerance: float


def make_pair(precision: str, folder: Path, source: Path | None = None) -> Pair:
    """``source``: a model in fp32 instead of a tiny Qwen3-MoE."""
    source = source or make_tiny_model(folder / "source", *SIZES, *MORE)
    old, new = (_made(precision, source, folder / str(k), k) for k in range(2))
    before, after = digests_of(old.served), digests_of(new.served)
    assert before.keys() == after.keys() and not any(before[n] == after[n] for n in after)
    if precision == "bf16":  # every operation rounds, and those of transformers do not
        return Pair(precision, "bf16", old, new, 0.1)
    return Pair(precision, "fp32", old, new, 5e-5)


def _made(precision: str, source: Path, folder: Path, seed: int) -> Model:
    trained = served = values = folder / "trained"
    shutil.copytree(source, trained)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        moved = (tensor + 0.02 * torch.randn(tensor.shape, generator=random)) / (1 + seed)
        tensors[name] = moved.to(torch.bfloat16) if precision == "bf16" else moved
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    if precision.startswith("fp8 "):
        served = folder / "served"
        tool("quantize_hf_fp8").quantize(trained, served, precision.removeprefix("fp8 "), [])
        values = plain_values(served, folder / "values")
    (sample,) = random_samples(1, 1)
    [logprobs] = reference_logprobs(values, [replace(sample, tokens=np.array(PROMPT, np.int32))])
    return Model(trained, served, logprobs)


def push_each_way(
    pool: WorkerPool,
    pair: Pair,
    layout: dict[str, int],
    engine: str,
    server: dict[str, Any],
    folder: Path,
    record: Callable[[str, object], None],
) -> None:
    """Every transport, to a server that holds the old weights, and what became of it. ``record``:
    where tools/push_table.py finds what passed.
    """
    axes = "x".join(f"{axis.upper()}{n}" for axis, n in layout.items() if axis != "dp")
    kind = f"sglang TP{server['ranks']}" if engine == "sglang" else engine
    cell = f"{kind}|{pair.precision}|{axes or 1}"
    record("cell", cell)
    expected = digests_of(pair.new.served)
    files = _from_files(pair.new.served, server)
    checksum = checksum_of(server) if engine == "sglang" else None
    assert files["logprobs"] == pytest.approx(pair.new.logprobs.tolist(), abs=pair.tolerance)
    own = None if pair.new.served == pair.new.trained else pair.new.served
    ranks = pool.run(
        "tests.sync.work_matrix:push_each_way",
        world=mesh_of(layout).world_size,
        hf=pair.new.trained,
        served=own,
        dtype=pair.dtype,
        layout=layout,
        ways=WAYS,
        engine=engine,
        server=server,
        before=pair.old.served,
        folder=folder,
    )
    for version, (way, found) in enumerate(zip(WAYS, ranks[0], strict=True), start=1):
        where = (layout, way)
        assert found["lost"] == {}, where
        assert found["digests"] == expected, where
        assert found["receipt"].digest == _digest_of(expected), where
        assert found["receipt"].tensors == len(expected), where
        assert found["moves"] == [("commit", "0", str(version))], (where, found["moves"])
        proof = [op for op in found["operations"] if op in ("snapshot", "compare")]
        assert proof == (["snapshot", "compare"] if engine == "sglang" else []), where
        assert found["checksum"] == checksum, where  # of all that it computes with, by its own code
        # Its own files, loaded by its own code, give the very same numbers.
        assert found["new"]["logprobs"] == files["logprobs"] != found["old"]["logprobs"], where
        # What was asked before is not answered from keys of the old weights.
        assert bool(found["old"]["cached"]) == (engine == "sglang"), where
        assert found["new"]["cached"] == 0, where
        assert (found["old"]["version"], found["new"]["version"]) == ("0", str(version)), where
        record("push", f"{cell}|{way}")


def _from_files(folder: Path, server: dict[str, Any]) -> dict[str, Any]:
    ask(server, "/update_weights_from_disk", model_path=str(folder), weight_version="0")
    return sampled(server)


def _digest_of(digests: dict[str, str]) -> str:
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
