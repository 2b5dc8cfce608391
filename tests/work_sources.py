"""Worker side of ``test_sources.py``: parts of a source, each with just what it reads."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl import loop
from megarl.config.schema import Config
from megarl.curriculum import LengthCurriculum
from megarl.errors import DataError
from megarl.evaluation import Evaluations
from megarl.rollout_source import RolloutSource, collection_settings


class Words:
    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())


def settings(**sections: Any) -> Config:
    base = {
        "run": {"dir": "unused", "steps": 10},
        "model": {"hf": "unused"},
        "algo": {"policy": {"name": "gspo"}},
        "optim": {"lr": 1e-3},
    }
    return Config.model_validate(base | sections)


def bare(config: Config, **parts: Any) -> RolloutSource:
    source = object.__new__(RolloutSource)
    source.config = config
    for name, part in parts.items():
        setattr(source, name, part)
    return source


def prompts(
    rank: int, folder: str, lengths: dict[str, int], evaluation: dict[str, Any]
) -> dict[str, int] | str:
    """Words of what is loaded of each file at the start, or what is wrong with one."""
    paths = {name: Path(folder) / f"{name}.jsonl" for name in lengths}
    for name, path in paths.items():
        path.write_text(json.dumps({"prompt": "word " * lengths[name]}) + "\n")
    given = [{**chosen, "prompts": str(paths["own"])} for chosen in evaluation.get("sets", [])]
    config = settings(
        data={"prompts": str(paths["train"]), "heldout": paths.get("heldout")},
        eval={**evaluation, "sets": given},
        rollout={"context_length": 64, "max_new_tokens": 16},
    )
    source = bare(config, tokenizer=Words())
    assert dist.group.WORLD is not None
    try:
        found = {"train": source._training_prompts()}
        evaluations = Evaluations(config, 0, dist.group.WORLD, source._prompts)
    except DataError as e:
        return str(e)
    found["heldout"] = evaluations.heldout
    found["own"] = [item for _, items in evaluations.sets for item in items]
    return {name: len(items[0].token_ids) for name, items in found.items() if items}


def limits_as_the_collection_loads(rank: int) -> dict[str, int]:
    stages = [{"max_new_tokens": 8, "until_step": 2}, {"max_new_tokens": 24}]
    second = {"lengths": {"stage": 1, "max_new_tokens": 24, "accuracies": []}}
    runs = {
        "of stage 2": ({"length_stages": stages}, second),
        "without stages": ({"max_new_tokens": 9}, {}),
    }
    found = {}
    for name, (rollout, state) in runs.items():
        config = settings(rollout=rollout)
        collection = SimpleNamespace(max_new_tokens=0)

        def load_state(*_: Any, of: str = name, its: Any = collection) -> None:
            found[of] = its.max_new_tokens

        collection.load_state = load_state
        source = bare(
            config,
            collection=collection,
            stream=SimpleNamespace(load_state=lambda state: None),
            lengths=LengthCurriculum(config.rollout.stages),
        )
        source.load_state({"collection": {}, **state}, Path("unused"), 3)
    return found


def decisive(rank: int, rollout: dict[str, Any]) -> dict[str, Any]:
    return dict(collection_settings(settings(rollout=rollout)).decisive)


def bytes_of_a_checkpoint(rank: int) -> int:
    """What ``loop.save`` says that it needs."""
    asked: list[int] = []

    def save(step: int, *, num_bytes: int, **rest: Any) -> str:
        asked.append(num_bytes)
        return "nowhere"

    layer = torch.nn.Linear(5, 5, bias=False, dtype=torch.float64)  # 25 * (8 + 12) bytes
    model = SimpleNamespace(model=[layer, layer])
    collection = SimpleNamespace(ready_bytes=lambda: 77, state=dict)
    stream = SimpleNamespace(state=dict)
    parts: Any = SimpleNamespace(
        stop=SimpleNamespace(where=""),
        trained={"model": model},
        actor=SimpleNamespace(spec=SimpleNamespace(as_json=dict)),
        saves_reference=False,
        critic=None,
        source=bare(settings(), collection=collection, stream=stream),
        controllers=SimpleNamespace(state=dict),
        config=settings(),
        parallel=SimpleNamespace(mesh=SimpleNamespace(world_size=4)),
        checkpoints=SimpleNamespace(save=save),
        reporter=SimpleNamespace(note=partial(str)),
    )
    loop.save(parts, 3)
    return asked[0]
