"""Do the files that this run will read exist, and are they what the setting promises?"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.errors import Problem
from megarl.rundir import RunDir

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def file_problems(config: Config) -> Iterator[Problem]:
    yield from _run_dir(config.run.dir, config.run.resume)
    yield from _hf_folder(config)
    yield from _checkpoint("model.load", config.model.load, "megatron")
    if config.critic.lr is not None:
        yield from _checkpoint("critic.load", config.critic.load, "megatron", "critic")
        yield from _critic_folder(config)
    if config.run.mode == "rl":
        yield from _jsonl("data.prompts", config.data.prompts)
        yield from _jsonl("data.heldout", config.data.heldout)
        for i, chosen in enumerate(config.eval.sets):
            yield from _jsonl(f"eval.sets[{i}].prompts", chosen.prompts)
        yield from _server_files(config)
        yield from _served_folder(config)
    elif config.run.mode == "sft":
        yield from _jsonl("data.demonstrations", config.data.demonstrations)
    elif config.data.recorded is not None:
        yield from _recorded(config.data.recorded, config.run.steps)


def read_hf_config(folder: Path) -> dict[str, Any] | None:
    """``config.json`` of a Hugging Face folder; None where ``file_problems`` has a complaint."""
    try:
        value = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _run_dir(path: Path, resume: bool) -> Iterator[Problem]:
    if not (above := _above(path)).is_dir():
        yield Problem(
            "run.dir", f"{path}, where {above} is a file", "a folder, or a path for a new one"
        )
    holds = RunDir(path).holds_a_run()
    if holds and not resume:
        accepted = "another folder, or run.resume=true to go on with that run"
        yield Problem("run.dir", f"{path}, which already holds a run", accepted)
    if resume and not holds:
        yield Problem("run.resume", f"true, but {path} holds no run", "false for a new run")


def _above(path: Path) -> Path:
    """The path, or the last one above it that is there."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _hf_folder(config: Config) -> Iterator[Problem]:
    folder = config.model.hf
    accepted = "a local Hugging Face folder (nothing is downloaded)"
    yield from _folder("model.hf", folder, accepted)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        yield Problem("model.hf", f"{folder} without config.json", accepted)
    elif read_hf_config(folder) is None:
        yield Problem("model.hf", f"{folder}/config.json, which does not parse", "a JSON object")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield Problem(
            "model.hf", f"{folder} without a tokenizer", f"one of {', '.join(_TOKENIZERS)}"
        )
    rollout = config.rollout
    managed = config.run.mode == "rl" and not rollout.urls and rollout.engine == "embedded"
    served = managed and rollout.model is None
    if (config.model.load is None or served) and not any(folder.glob("*.safetensors")):
        accepted = (
            "weights there: the managed server starts with them"
            if served
            else ("weights there, or model.load")
        )
        yield Problem("model.hf", f"{folder} without *.safetensors", accepted)


def _served_folder(config: Config) -> Iterator[Problem]:
    folder, rollout = config.rollout.model, config.rollout
    if folder is None:
        return
    accepted = "a local Hugging Face folder (nothing is downloaded)"
    yield from _folder("rollout.model", folder, accepted)
    if not folder.is_dir():
        return
    if read_hf_config(folder) is None:
        found = f"{folder} without a config.json that is an object"
        yield Problem("rollout.model", found, accepted)
    if not rollout.urls and not any(folder.glob("*.safetensors")):
        accepted = "weights there: managed servers start with them"
        yield Problem("rollout.model", f"{folder} without *.safetensors", accepted)


def _critic_folder(config: Config) -> Iterator[Problem]:
    folder = config.critic.hf
    if folder is None:
        return
    accepted = "a local Hugging Face folder (nothing is downloaded)"
    yield from _folder("critic.hf", folder, accepted)
    if not folder.is_dir():
        return
    if read_hf_config(folder) is None:
        yield Problem("critic.hf", f"{folder} without a config.json that is an object", accepted)
    if config.critic.load is None and not any(folder.glob("*.safetensors")):
        yield Problem(
            "critic.hf", f"{folder} without *.safetensors", "weights there, or critic.load"
        )


def _checkpoint(key: str, path: Path | None, *parts: str) -> Iterator[Problem]:
    """A checkpoint that has one of ``parts``."""
    if path is None:
        return
    wanted = " or ".join(f"{part}/" for part in parts)
    accepted = f"the folder of a checkpoint, with {wanted} in it"
    yield from _folder(key, path, accepted)
    if path.is_dir() and not any((path / part).is_dir() for part in parts):
        yield Problem(key, f"{path} without {wanted}", accepted)


def _server_files(config: Config) -> Iterator[Problem]:
    rollout, folder = config.rollout, config.sync.folder
    if folder is not None and not (above := _above(folder)).is_dir():
        accepted = "a folder that servers share, or a path for a new one"
        yield Problem("sync.folder", f"{folder}, where {above} is a file", accepted)
    if rollout.key_file is not None and not rollout.key_file.is_file():
        yield Problem(
            "rollout.key_file", f"{rollout.key_file}, which is no file", "a file with the key"
        )
    managed = rollout.engine == "sglang" and not rollout.urls
    for key in ("server_command", "router_command"):
        command = getattr(rollout, key)
        if managed and command and shutil.which(command[0]) is None:
            found = f"{command[0]}, which is no program here"
            accepted = "a program's path, or its name on PATH, first"
            yield Problem(f"rollout.{key}", found, accepted)


def _recorded(folder: Path, steps: int) -> Iterator[Problem]:
    accepted = f"a folder with step_1.npz to step_{steps}.npz (monitor.record_rollouts writes them)"
    yield from _folder("data.recorded", folder, accepted)
    if not folder.is_dir():
        return
    names = (re.fullmatch(r"step_(\d+)\.npz", path.name) for path in folder.iterdir())
    found = {int(m[1]) for m in names if m}
    missing = next((s for s in range(1, steps + 1) if s not in found), None)
    if missing is not None:
        state = f"{len(found)} recorded steps, without step {missing}"
        yield Problem("data.recorded", f"{folder} with {state}", accepted)


def _folder(key: str, path: Path, accepted: str) -> Iterator[Problem]:
    if not path.exists():
        yield Problem(key, f"{path}, which does not exist", accepted)
    elif not path.is_dir():
        yield Problem(key, f"{path}, which is no folder", accepted)


def _jsonl(key: str, path: Path | None) -> Iterator[Problem]:
    if path is None:
        return
    accepted = "a JSONL file with at least one line"
    if not path.is_file():
        state = "which is no file" if path.exists() else "which does not exist"
        yield Problem(key, f"{path}, {state}", accepted)
    elif path.stat().st_size == 0:
        yield Problem(key, f"{path}, which is empty", accepted)
