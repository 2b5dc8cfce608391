"""Checkpoints of a run: written beside, published by rename, pruned only after a newer one is
complete.

::

    checkpoints/step_40/megatron/    the policy: weights and optimizer, distributed (actor/state.py)
                       critic/       the critic, if there is one: likewise
                       reference/    the reference policy's weights, where they may have moved
                       samples/      what was sampled and not trained yet (stock.py)
                       loop.json     everything else: step, weights version, prompt cursor
                       model.json    the policy's dimensions
                       critic.json   the critic's, if there is one
                       digests.json  of imported weights: what they were (digests.py)
                       files.json    {tensor: file} of the Hugging Face folder it comes from
                       hf/           config and tokenizer files of the model

``step_40.part`` is a checkpoint being written, or what a killed run left of one: never loaded,
replaced by the next.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.errors import DataError, RunError
from megarl.hostcomm import agree
from megarl.models.dist_metadata import record_checksum
from megarl.models.hf_files import copy_beside
from megarl.models.hf_headers import weight_map
from megarl.rundir import write_json

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d+)")
MEGATRON, CRITIC, REFERENCE, SAMPLES = "megatron", "critic", "reference", "samples"
WriteParts = dict[str, Callable[[Path], None]]  # by folder; each writes on all ranks
LOOP, MODEL, CRITIC_MODEL, HF = "loop.json", "model.json", "critic.json", "hf"
FILES = "files.json"


@dataclass(frozen=True)
class CheckpointManager:
    """``rank``/``host``: this trainer rank and the gloo group of all; methods are collective unless
    said.
    """

    folder: Path
    keep: int
    rank: int
    host: dist.ProcessGroup

    def save(
        self,
        step: int,
        loop_state: dict[str, Any],
        models: Mapping[str, dict[str, Any]],
        hf_files: Path,
        write_parts: WriteParts,
        num_bytes: int,
    ) -> Path:
        """Publish checkpoint ``step``. ``write_parts[name](folder)`` writes the distributed part
        ``name`` on all ranks; ``num_bytes`` is the size of all. ``models``: dimensions by file.
        Raises RunError, with older checkpoints untouched, if the disk cannot hold it.
        """
        final = self.folder / f"step_{step}"
        part = final.with_name(final.name + ".part")
        self._on_rank_zero(lambda: _prepare(part, write_parts, num_bytes), "preparing a checkpoint")
        try:
            for name, write in write_parts.items():
                write(part / name)
        except Exception as e:
            # No agree() here: the others may still wait inside upstream's own collectives. This
            # rank ends, and with it their waits.
            raise RunError(
                f"writing checkpoint {part}: {type(e).__name__}: {e}; "
                "older checkpoints are untouched"
            ) from e
        agree(None, self.host, "writing a checkpoint")  # published only when all have written

        def publish() -> None:
            for name in write_parts:
                record_checksum(part / name)
            write_json(part / LOOP, {"step": step, **loop_state})
            for name, model in models.items():
                write_json(part / name, model)
            self._write_hf_files(hf_files, part)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            for old in self.complete_steps(self.folder)[: -self.keep]:
                shutil.rmtree(self.folder / f"step_{old}")

        self._on_rank_zero(publish, "publishing a checkpoint")
        return final

    def _write_hf_files(self, folder: Path, part: Path) -> None:
        """Of ``folder``; where that is gone since the run began, of the newest checkpoint: a run
        does not lose its work with it.
        """
        if folder.is_dir():
            if files := weight_map(folder):
                write_json(part / FILES, files)
            copy_beside(folder, part / HF)
            return
        steps = self.complete_steps(self.folder)
        before = self.folder / f"step_{steps[-1]}" if steps else None
        if before is None or not (before / HF).is_dir():
            log.warning("%s is gone: a checkpoint has no config and tokenizer", folder)
            return
        log.warning("%s is gone: its config and tokenizer are taken from %s", folder, before)
        copy_beside(before / HF, part / HF)
        if (before / FILES).is_file():
            shutil.copyfile(before / FILES, part / FILES)

    def loop_state(self, step: int) -> dict[str, Any]:
        """What ``save`` got as ``loop_state``. Not collective: every rank reads it."""
        return read_json(self.folder / f"step_{step}" / LOOP)

    @staticmethod
    def complete_steps(folder: Path) -> list[int]:
        """Steps of the complete checkpoints in ``folder``, oldest first."""
        if not folder.is_dir():
            return []
        names = [_NAME.fullmatch(p.name) for p in folder.iterdir() if (p / LOOP).is_file()]
        return sorted(int(m[1]) for m in names if m)

    def _on_rank_zero(self, action: Callable[[], None], what: str) -> None:
        error: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except RunError as e:
                error = e
            except Exception as e:  # whatever it is, the other ranks wait in agree() to hear of it
                error = RunError(f"{what}: {type(e).__name__}: {e}")
        agree(error, self.host, what)


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError naming the file when it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: {e}") from e
    if not isinstance(value, dict):
        raise DataError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


def _prepare(part: Path, names: Iterable[str], num_bytes: int) -> None:
    shutil.rmtree(part, ignore_errors=True)
    for name in names:
        (part / name).mkdir(parents=True)
    free = shutil.disk_usage(part).free
    if free < num_bytes:
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(
            f"a checkpoint needs {num_bytes / 1e9:.2f} GB, {part.parent} has "
            f"{free / 1e9:.2f} GB free; free some, lower checkpoint.keep, or move run.dir"
        )
