"""Packed rows on disk: what an optimizer step was computed from, kept when a number in it was not
finite (``train.on_nonfinite``).

One file an optimizer step and rank, in numpy's format without pickled objects. Per-token fields of
all rows lie end to end, with the rows' lengths beside them; a field that no row has is left out.
``read_rows`` gives back rows that ``MegatronActor.forward_backward`` takes.
"""

import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.errors import DataError
from megarl.types import PackedBatch

FORMAT = 1
KEPT_FILES = 4  # of one rank, the newest
_FILE = re.compile(r"step_\d+\w*_rank_(\d+)\.npz")
_BOUNDS = ("cu_seqlens", "lengths", "samples")  # by segment, not by token
_OWN_TOKENS = ("old_routing",)  # of 1 / (cp tp) of every row's
_PER_TOKEN = tuple(f.name for f in fields(PackedBatch) if f.name not in _BOUNDS)


@dataclass(frozen=True)
class Fault:
    """Trained tokens of row ``row`` whose numbers were not finite, on one rank."""

    row: int  # index in the optimizer step's rows
    samples: list[int]
    bad: torch.Tensor  # bool [T] the tokens left out, for sequence objectives the whole sequence
    output: (
        torch.Tensor
    )  # f32 [T] log-probs or values of this pass, NaN where another rank has them


@dataclass(frozen=True)
class KeptRows:
    """``whose``: policy or critic. ``index``: of the optimizer step among those of the training
    step. ``names``: sample -> name, of all samples in the rows. ``bad``, ``output``: [T] by row, as
    in ``Fault``; of a row without one, False and NaN. ``found``: the error's text.
    """

    whose: str
    step: int
    index: int
    rank: int
    found: str
    rows: list[PackedBatch]
    names: dict[int, str]
    bad: list[torch.Tensor]
    output: list[torch.Tensor]


def rows_path(folder: Path, step: int, index: int, rank: int, whose: str = "policy") -> Path:
    """``step_000012_rank_3.npz``; of a later optimizer step of the training step, or of a critic,
    with that in its name.
    """
    part = (f"_minibatch_{index}" if index else "") + (f"_{whose}" if whose != "policy" else "")
    return folder / f"step_{step:06d}{part}_rank_{rank}.npz"


def write_rows(folder: Path, kept: KeptRows) -> Path:
    """The file appears whole or not at all; of older ones of this rank ``KEPT_FILES`` - 1 stay."""
    path = rows_path(folder, kept.step, kept.index, kept.rank, kept.whose)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **cast(Any, _arrays(kept)))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    for old in _files(folder, kept.rank)[:-KEPT_FILES]:
        old.unlink(missing_ok=True)
    return path


def read_rows(path: Path) -> KeptRows:
    """What ``write_rows`` wrote, bit for bit. Raises DataError for a damaged or foreign file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if int(arrays["format"]) != FORMAT:
            raise DataError(f"{path}: format {int(arrays['format'])}; accepted: {FORMAT}")
        return _kept(arrays)
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"{path} is no file of kept rows, or is damaged: {e}") from e


def _files(folder: Path, rank: int) -> list[Path]:
    """Of a rank, the oldest first."""
    mine = (
        p for p in folder.glob("step_*.npz") if (m := _FILE.fullmatch(p.name)) and int(m[1]) == rank
    )
    return sorted(mine, key=lambda p: (p.stat().st_mtime_ns, p.name))


def _arrays(kept: KeptRows) -> dict[str, NDArray[Any]]:
    rows = kept.rows
    arrays: dict[str, NDArray[Any]] = {
        "format": np.asarray(FORMAT),
        "whose": np.asarray(kept.whose),
        "found": np.asarray(kept.found),
        "step": np.asarray(kept.step),
        "index": np.asarray(kept.index),
        "rank": np.asarray(kept.rank),
        "row_tokens": np.asarray([len(row.tokens) for row in rows], np.int64),
        "row_segments": np.asarray([len(row.lengths) for row in rows], np.int64),
        "row_samples": np.asarray([len(row.samples) for row in rows], np.int64),
        "cu_seqlens": torch.cat([row.cu_seqlens for row in rows]).numpy(),
        "lengths": torch.cat([row.lengths for row in rows]).numpy(),
        "samples": np.asarray([i for row in rows for i in row.samples], np.int64),
        "names": np.asarray([kept.names[i] for row in rows for i in row.samples], np.str_),
        "bad": torch.cat(kept.bad).numpy(),
        "output": torch.cat(kept.output).numpy(),
    }
    for name in _PER_TOKEN:
        parts = [getattr(row, name) for row in rows]
        if all(part is not None for part in parts):
            arrays[name] = torch.cat(parts).numpy()
    return arrays


def _kept(arrays: dict[str, NDArray[Any]]) -> KeptRows:
    tokens, segments = arrays["row_tokens"], arrays["row_segments"]
    samples = _cut(arrays["samples"], arrays["row_samples"])
    bounds = _cut(arrays["cu_seqlens"], segments + 1)
    lengths = _cut(arrays["lengths"], segments)
    columns = {
        name: _cut(arrays[name], _share(name, arrays[name], tokens))
        for name in _PER_TOKEN
        if name in arrays
    }
    rows = [
        PackedBatch(
            cu_seqlens=torch.from_numpy(bounds[r]),
            lengths=torch.from_numpy(lengths[r]),
            samples=tuple(samples[r].tolist()),
            **{name: torch.from_numpy(parts[r]) for name, parts in columns.items()},
        )
        for r in range(len(tokens))
    ]
    return KeptRows(
        whose=str(arrays["whose"]),
        step=int(arrays["step"]),
        index=int(arrays["index"]),
        rank=int(arrays["rank"]),
        found=str(arrays["found"]),
        rows=rows,
        names=dict(zip(arrays["samples"].tolist(), map(str, arrays["names"]), strict=True)),
        bad=[torch.from_numpy(part) for part in _cut(arrays["bad"], tokens)],
        output=[torch.from_numpy(part) for part in _cut(arrays["output"], tokens)],
    )


def _share(name: str, array: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    """How many entries each row has: one a token, but in what a rank holds of its own tokens."""
    return tokens * len(array) // max(1, tokens.sum()) if name in _OWN_TOKENS else tokens


def _cut(array: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    if lengths.sum() != len(array) or (lengths < 0).any():
        raise ValueError(f"{len(array)} entries for lengths that sum to {lengths.sum()}")
    return [part.copy() for part in np.split(array, np.cumsum(lengths)[:-1])]


def kept_rows(
    rows: Sequence[PackedBatch], faults: Sequence[Fault], names: Sequence[str], **about: Any
) -> KeptRows:
    """From an optimizer step's rows and what was found in them. ``about``: the other fields."""
    bad = [torch.zeros(len(row.tokens), dtype=torch.bool) for row in rows]
    output = [torch.full((len(row.tokens),), torch.nan) for row in rows]
    for fault in faults:
        bad[fault.row], output[fault.row] = fault.bad, fault.output
    there = {i: names[i] for row in rows for i in row.samples}
    return KeptRows(rows=list(rows), names=there, bad=bad, output=output, **about)
