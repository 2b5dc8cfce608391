"""Runs of every mode that are valid, what is changed in them, and what that gives."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.config.validate import validate
from megarl.errors import ConfigError

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
DENSE = {k: v for k, v in MOE.items() if not k.startswith(("num_exp", "moe"))} | {
    "model_type": "qwen3"
}
SUPPORTED = ("gpt_oss", "qwen3", "qwen3_moe")


def base(place: Path, mode: str) -> list[str]:
    """A valid run of each mode; the layout has 8 ranks."""
    common = [f"run.mode={mode}", f"run.dir={place}/run", "run.steps=10", f"model.hf={place}/model"]
    common += ["optim.lr=1e-4", "parallel={tp: 2, pp: 2, dp: 2, ep: 2}"]
    if mode == "sft":
        return [
            *common,
            "algo.policy.name=sft",
            f"data.demonstrations={place}/demonstrations.jsonl",
        ]
    common += ["algo.policy.name=gspo"]
    if mode == "train_only":
        return [*common, f"data.recorded={place}/rollouts"]
    return [*common, f"data.prompts={place}/prompts.jsonl"]


@dataclass
class Case:
    """``set``: overrides on ``mode``'s base. ``expected``: key -> words of found | accepted."""

    set: list[str]
    expected: dict[str, list[str]]
    mode: str = "rl"
    world_size: int | None = 8
    num_gpus: int = 0
    hf: dict[str, Any] = field(default_factory=dict)  # changes to MOE
    dense: bool = False
    served: dict[str, Any] | None = None  # what rollout.model has besides; None: not at hand

    def __str__(self) -> str:
        return " ".join([self.mode, *self.set, *self.hf, *(self.served or {})])


def found_problems(case: Case, place: Path) -> list[tuple[str, str]]:
    texts = [x.replace("HERE", str(place)) for x in case.set]
    config = load_config([], [*base(place, case.mode), *texts])
    hf = {**(DENSE if case.dense else MOE), **case.hf}
    hf = {k: v for k, v in hf.items() if v is not None}
    try:
        validate(
            config,
            world_size=case.world_size,
            num_gpus=case.num_gpus,
            hf_config=hf,
            server_hf_config=None if case.served is None else {**hf, **case.served},
            supported_models=SUPPORTED,
            refused_models={"qwen3_next": "its layers do not run"},
        )
    except ConfigError as e:
        return [(p.key, f"{p.found} | {p.accepted}") for p in e.problems]
    return []


def assert_exactly(case: Case, place: Path) -> None:
    found = found_problems(case, place)
    assert sorted(key for key, _ in found) == sorted(case.expected), found
    for key, text in found:
        for word in case.expected[key]:
            assert word in text, text
