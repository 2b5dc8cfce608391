"""What the form of servers' weights (``served.py``) contradicts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.config.served import (
    QUANTISED,
    STORED_DTYPES,
    STORED_SCALES,
    served_scales,
    stored_dtype,
)
from megarl.errors import Problem

_BLOCK = [128, 128]


def sync_problems(
    config: Config, hf: Mapping[str, Any] | None, server_hf: Mapping[str, Any] | None
) -> Iterator[Problem]:
    """Of ``run.mode=rl``. ``hf``, ``server_hf``: config.json of ``model.hf`` and of
    ``rollout.model``; None: not at hand, what they decide is not checked.
    """
    run, sync = config.run, config.sync
    if run.mode == "rl" and run.timeout_s < 2 * sync.timeout_s:
        accepted = f">= {2 * sync.timeout_s:g}, twice sync.timeout_s: while one rank waits for a "
        yield Problem(
            "run.timeout_s", f"{run.timeout_s:g}", accepted + "server, others wait for it"
        )
    folder, key = config.rollout.model, "rollout.model"
    if folder is None:
        folder, key, server_hf = config.model.hf, "model.hf", hf
    if config.run.mode != "rl" or server_hf is None:
        return
    if key == "rollout.model":
        yield from _another_kind(config, hf, server_hf)
    value = server_hf.get(QUANTISED)
    if not value:
        yield from _plain(config, folder)
        return
    found = f"{folder}, whose weights are quantised"
    if not isinstance(value, dict) or value.get("quant_method") != "fp8":
        method = value.get("quant_method") if isinstance(value, dict) else value
        yield Problem(key, f"{found} by {method!r}", f"weights in bf16, fp32, or FP8 in {_BLOCK}")
    elif value.get("weight_block_size") != _BLOCK:
        blocks = value.get("weight_block_size")
        accepted = f"FP8 in blocks of {_BLOCK}, as weights are sent in"
        yield Problem(key, f"{found} in blocks of {blocks}", accepted)
    else:
        yield from _scales(config, folder, server_hf)


def _another_kind(
    config: Config, hf: Mapping[str, Any] | None, server_hf: Mapping[str, Any]
) -> Iterator[Problem]:
    """What nobody who needs config.json whole has to be asked for; the rest is
    ``models/served.py``'s.
    """
    folder, dtype = config.rollout.model, stored_dtype(server_hf)
    if dtype not in STORED_DTYPES:
        yield Problem(
            "rollout.model", f"{folder}, whose dtype is {dtype}", " or ".join(STORED_DTYPES)
        )
    mine, theirs = (values.get("model_type") for values in (hf or server_hf, server_hf))
    if mine != theirs:
        accepted = f"the model of model.hf, {mine}, in whatever precision"
        yield Problem("rollout.model", f"{folder}, whose model_type is {theirs}", accepted)


def _plain(config: Config, folder: Path) -> Iterator[Problem]:
    if config.sync.fp8 != "auto":
        found = f"{config.sync.fp8}, which has no effect (servers hold {folder}, which is plain)"
        yield Problem("sync.fp8", found, "leave it out, or rollout.model: a folder in FP8")


def _scales(config: Config, folder: Path, server_hf: Mapping[str, Any]) -> Iterator[Problem]:
    """One kind of them, wherever a setting names one."""
    stored = STORED_SCALES.get(server_hf[QUANTISED].get("scale_fmt"))
    scales = served_scales(config, server_hf)
    whose = f"{folder}'s config.json says" if stored else f"sync.fp8={config.sync.fp8} means"
    because = f"{scales}: {whose} so, and servers hold one kind of scales"
    if stored and config.sync.fp8 not in ("auto", stored):
        yield Problem("sync.fp8", config.sync.fp8, f"auto, {because}")
    if config.rollout.fp8 not in ("none", scales):
        yield Problem("rollout.fp8", config.rollout.fp8, f"none, {because}")
    section = config.precision.fp8
    if section is not None and section.recipe == "blockwise" and section.scales != scales:
        yield Problem("precision.fp8.scales", section.scales, because)
