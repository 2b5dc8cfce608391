"""No rank gathers the whole model, and rank 0 is no funnel: what each sender sends, and what it
holds meanwhile, are of the size that the layout says. Ranks are those of real actors.

1. A layer's weights are sent by one rank of the layer's stage; layers take turns among a stage's
   senders. What is in no layer is sent by a stage's last one. But where ranks that hold different
   experts send, each sends its own, if files have a tensor of each.
2. A sender holds at most two buckets and one parameter of all ranks that have a part of it: as it
   was gathered (not its own part of it) or is on its way, taken apart, and put together as files
   have it. A rank that does not send holds nothing besides its model.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model, wide

pytestmark = pytest.mark.dist

LAYERS = 4
BUCKET = 48_000  # bytes; the model has 2 MB, a layer's experts have 250 kB
EXPERTS = 8
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")

CASES = [
    ({"dp": 2, "ep": 2}, 1),
    ({"dp": 2, "ep": 2}, 2),
    ({"tp": 2}, 2),
    pytest.param({"tp": 2, "ep": 2, "etp": 1}, 2, marks=pytest.mark.slow),
    ({"pp": 2}, 1),
]


def send(pool: WorkerPool, hf: Path, layout: dict[str, int], senders: int, **how: Any) -> Any:
    how = {"layout": layout, "senders": senders, "max_bytes": BUCKET, **how}
    return pool.run("tests.sync.work_bounds:send", world=mesh_of(layout).world_size, hf=hf, **how)


def sender_of(name: str, layout: dict[str, int], senders: int) -> int:
    """By rule 1: of two ranks, stages one after another, a stage's senders likewise."""
    pp, layer, expert = layout.get("pp", 1), _OF_LAYER.match(name), _OF_EXPERT.search(name)
    if expert and senders == layout.get("ep", 1) == 2:
        return int(expert[1]) // (EXPERTS // 2)
    if layer is None:
        stage, turn = (0 if "embed" in name else pp - 1), -1
    else:
        stage, turn = int(layer[1]) * pp // LAYERS, int(layer[1])
    ranks = range(stage * 2 // pp, (stage + 1) * 2 // pp)[:senders]
    return ranks[turn % senders]


def bound(rank: dict[str, Any], layout: dict[str, int]) -> int:
    """Rule 2, of the largest parameter that the rank has a part of."""
    tp, ep = layout.get("tp", 1), layout.get("ep", 1)
    whole = max(rank["expert"] * ep * layout.get("etp", tp), rank["other"] * tp)
    return 2 * BUCKET + 3 * whole


@pytest.mark.parametrize(("layout", "senders"), CASES, ids=str)
def test_every_sender_sends_its_layers_whole_and_holds_two_buckets_and_a_parameter(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], senders: int
) -> None:
    ranks = send(pool, tiny_model, layout, senders)
    weights = load_file(tiny_model / "model.safetensors")
    owner = {name: sender_of(name, layout, senders) for name in weights}
    for rank, found in enumerate(ranks):
        assert found["sizes"] == {n: t.nbytes for n, t in weights.items() if owner[n] == rank}
        if not found["sizes"]:
            assert found["peak"] == 0
            continue
        assert 2 * BUCKET <= found["peak"] <= bound(found, layout)
        fewest = sum(found["buckets"]) / BUCKET
        assert fewest <= len(found["buckets"]) <= 2 * fewest + 1


def test_experts_that_files_stack_are_sent_by_their_layers_sender(
    pool: WorkerPool, tmp_path: Path
) -> None:
    layout = {"dp": 2, "ep": 2}
    hf = save_model("gpt_oss", tmp_path)
    weights = load_file(hf / "model.safetensors")
    assert any("experts.gate_up_proj" in name for name in weights)
    assert not any(map(_OF_EXPERT.search, weights))
    for rank, found in enumerate(send(pool, hf, layout, 2)):
        mine = {n: t.nbytes for n, t in weights.items() if sender_of(n, layout, 2) == rank}
        assert found["sizes"] == mine


def test_where_every_rank_sends_its_own_experts_none_is_copied(
    pool: WorkerPool, tiny_model: Path
) -> None:
    for found in send(pool, tiny_model, {"dp": 2, "ep": 2}, 2):
        assert 2 * BUCKET <= found["peak"] <= 2 * BUCKET + 2 * found["other"]


def test_a_rank_that_gathers_everything_first_is_beyond_the_bound(
    pool: WorkerPool, tiny_model: Path
) -> None:
    """The measure sees what it is to see."""
    layout = {"dp": 2, "ep": 2}
    sender, other = send(pool, tiny_model, layout, 1, hoard=True)
    experts = sum(size for name, size in sender["sizes"].items() if ".experts." in name)
    # half of them are the sender's own, and not copied
    assert sender["peak"] >= experts // 2 + 2 * BUCKET > 2 * bound(sender, layout)
    assert other["peak"] == 0


def test_a_sender_of_fp8_holds_two_buckets_and_a_parameter_as_it_is_rounded(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Rounding a matrix takes no more than a plain push has for a parameter."""
    hf = save_model("qwen3_moe yarn", tmp_path, **wide("qwen3_moe yarn"))
    layout = {"dp": 2, "ep": 2}
    sender, other = send(pool, hf, layout, 1, fp8=True)
    experts = {n: t for n, t in load_file(hf / "model.safetensors").items() if ".experts." in n}
    assert experts and all(sender["sizes"][name] == t.numel() for name, t in experts.items())
    assert sum(sender["sizes"].values()) > bound(sender, layout)
    assert 2 * BUCKET <= sender["peak"] <= bound(sender, layout)
    assert other["sizes"] == {} and other["peak"] == 0
