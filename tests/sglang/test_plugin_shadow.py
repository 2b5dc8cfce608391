"""The plugin's copy of weights, to which changes are made: without SGLang."""

import json
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megarl.ops import digest
from megarl.sync.delta import Base
from tests.helpers.dist import WorkerPool
from tests.ops.plain_digest import some

Tensors = dict[str, Tensor]
COUNT = 12
WORK = "tests.sglang.work_shadow:keep"


def versions(count: int = 3) -> list[Tensors]:
    """Tensors of several forms, some elements of which take steps of their bit pattern: one that is
    made twice shows.
    """
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float32)
    shapes = ((70, 130), (9,), (3, 5000), (), (0, 4))
    chance = torch.Generator().manual_seed(2)
    found = [{f"w{k}": some(shapes[k % 5], dtypes[k % 3], seed=k) for k in range(COUNT)}]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    while len(found) < count:
        new = {name: tensor.clone() for name, tensor in found[-1].items()}
        for tensor in new.values():
            flat = tensor.view(-1).view(bits[tensor.element_size()])
            flat += (torch.rand(flat.shape, generator=chance) < 0.02).to(flat.dtype)
        found.append(new)
    return found


def digests(tensors: Tensors) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def same(found: Tensors, expected: Tensors) -> bool:
    return digests(found) == digests(expected)


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture
def work(plugin: ModuleType) -> ModuleType:
    from tests.sglang import work_shadow

    return work_shadow


@pytest.fixture
def spared(work: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.node_memory, "_SPARE", 2**20)


@pytest.fixture
def kept(work: ModuleType, spared: None) -> object:
    """One rank's, that keeps what comes."""
    kept = work.shadow.Shadow(deadline_s=1.0)
    kept.agree(0, lambda numbers: [numbers])
    return kept


def pushed(work: ModuleType, kept: object, base: Base, tensors: Tensors, **held: str) -> Tensors:
    kept.begin()
    given = work.received(kept, work.bucket(base, tensors, held))
    kept.end()
    return given


@pytest.mark.dist
@pytest.mark.parametrize("hidden, copies", [([], 1), ([0], 2), ([1], 1), ([0, 1], 3)], ids=str)
def test_ranks_of_a_machine_share_one_copy_and_make_each_change_once(
    pool: WorkerPool, hidden: list[int], copies: int
) -> None:
    """And a rank that finds no other's memory has a copy of its own."""
    given = versions(4)
    ranks = pool.run(WORK, world=3, versions=given, hidden=hidden)
    whole = num_bytes(given[0])
    for rank in ranks:
        for step, expected in zip(rank["steps"], given, strict=True):
            assert step["error"] == "" and same(step["given"], expected)
            assert step["held"] == digests(expected)
        sizes = [step["bytes"] for step in rank["steps"]]
        assert sizes[0] == whole and max(sizes[1:]) < whole / 4
    found = [file for rank in ranks for file in rank["files"]]
    assert len(found) == 3 and len(dict(found)) == copies
    assert all(whole < size < 2 * whole + 2**18 for _, size in found)


@pytest.mark.dist
def test_a_rank_that_misses_a_bucket_costs_a_deadline_and_the_next_push_mends_it(
    pool: WorkerPool,
) -> None:
    given = versions(5)
    ranks = pool.run(WORK, world=2, versions=given, misses={2: 1})
    lost, other = (rank["steps"] for rank in ranks)
    assert "are not as far after 1.5 s" in lost[2]["error"] and other[2]["error"] == ""
    second = set(list(given[0])[1::2])
    assert lost[2]["held"].keys() == given[0].keys() - second
    for steps in (lost, other):
        assert same(steps[3]["given"], given[3]) and same(steps[4]["given"], given[4])
        sizes = [step["bytes"] for step in steps]
        assert sizes[4] < sizes[1] * 2 < sizes[3] < sizes[0]


@pytest.mark.dist
def test_a_rank_that_refuses_a_bucket_says_so_and_the_next_push_mends_it(pool: WorkerPool) -> None:
    given = versions(4)
    ranks = pool.run(WORK, world=2, versions=given, refuses={1: 1})
    first, refusing = (rank["steps"] for rank in ranks)
    assert "what is held is unknown" in refusing[1]["error"]
    assert "rank 1 has failed" in first[1]["error"]
    for steps in (first, refusing):
        assert [step["error"] for step in steps[2:]] == ["", ""]
        assert same(steps[2]["given"], given[2]) and same(steps[3]["given"], given[3])
        assert steps[3]["held"] == digests(given[3])


@pytest.mark.dist
def test_ranks_that_have_other_places_than_others_begin_anew(pool: WorkerPool) -> None:
    """One did not get a bucket of the first push."""
    given = versions(3)
    ranks = pool.run(WORK, world=2, versions=given, misses={0: 1})
    for rank in ranks:
        steps = rank["steps"]
        assert [step["error"] for step in steps[1:]] == ["", ""]
        assert same(steps[1]["given"], given[1]) and same(steps[2]["given"], given[2])
        assert steps[0]["bytes"] == steps[1]["bytes"] > 4 * steps[2]["bytes"]
    assert len({file for rank in ranks for file, _ in rank["files"]}) == 1


@pytest.mark.dist
@pytest.mark.parametrize("poor, hidden", [([0, 1], []), ([0], []), ([1], [0])], ids=str)
def test_too_little_memory_for_one_is_none_for_all_and_costs_no_push(
    pool: WorkerPool, poor: list[int], hidden: list[int]
) -> None:
    """Also where others have memory of their own."""
    given = versions(3)
    for rank in pool.run(WORK, world=2, versions=given, poor=poor, hidden=hidden):
        assert rank["files"] == [] and rank["steps"][-1]["held"] == {}
        for step, expected in zip(rank["steps"], given, strict=True):
            assert step["error"] == "" and same(step["given"], expected)
            assert step["bytes"] == num_bytes(given[0])


@pytest.mark.dist
def test_a_rank_that_does_not_answer_costs_a_deadline_and_nothing_is_kept(pool: WorkerPool) -> None:
    work = "tests.sglang.work_shadow:alone"
    (seconds, files), _ = pool.run(work, world=2, late_s=2.0, deadline_s=0.5)
    assert 0.5 <= seconds < 1.5 and files == []


def test_memory_that_ends_in_the_middle_is_given_back_and_what_came_is_right(
    work, kept, monkeypatch, caplog
) -> None:
    """Changes that come in the same push to what was kept before are made."""
    first, second, third = versions()
    base = Base()
    pushed(work, kept, base, first)
    held = dict(kept.digests)
    monkeypatch.setattr(work.node_memory, "_SPARE", 2**62)
    kept.agree(0, lambda numbers: [numbers])
    kept.begin()
    more = {**second, "w0": torch.ones(3), "new": some((2000,), torch.bfloat16)}
    with caplog.at_level(logging.WARNING):
        assert same(work.received(kept, work.bucket(base, more, held)), more)
    assert "too little memory" in caplog.text
    assert kept.digests == digests({n: t for n, t in second.items() if n != "w0"})
    kept.end()
    assert kept.digests == {} and work.files() == []
    kept.agree(0, lambda numbers: [numbers])
    assert same(pushed(work, kept, base, third), third) and work.files() == []


def test_nothing_is_kept_before_a_trainer_asks(work, spared) -> None:
    first, second, _ = versions()
    kept, base = work.shadow.Shadow(), Base()
    assert same(pushed(work, kept, base, first), first)
    assert kept.digests == {} and work.files() == []
    with pytest.raises(work.envelope.DeltaError, match="what is held is unknown"):
        pushed(work, kept, base, second, **digests(first))


def test_a_change_of_something_else_is_refused_and_nothing_is_changed(work, kept) -> None:
    first, second, third = versions()
    base, other = Base(), Base()
    pushed(work, kept, base, first)
    work.bucket(other, second, {})
    with pytest.raises(work.envelope.DeltaError, match=r"came as a change of .* held is"):
        pushed(work, kept, other, third, **digests(second))
    assert kept.digests == digests(first)
    kept.agree(0, lambda numbers: [numbers])
    assert same(pushed(work, kept, base, second, **kept.digests), second)


def test_a_damaged_change_leaves_what_is_not_certain_unknown(work, kept) -> None:
    first, second, _ = versions()
    base = Base()
    pushed(work, kept, base, first)
    sealed = work.bucket(base, second, kept.digests)
    [entry] = [entry for entry in sealed.entries if entry.name == "w0"]
    assert entry.base is not None
    entry.payload[-1] ^= 255
    entry.payload[2 * 3 : 2 * 3 + 2] = 200  # codes that there are not
    kept.begin()
    with pytest.raises(work.envelope.DeltaError, match="changes of weights: "):
        work.received(kept, sealed)
    assert kept.digests == {}
    kept.agree(0, lambda numbers: [numbers])
    assert same(pushed(work, kept, base, second), second)


def test_a_name_comes_once_in_an_update(work, kept) -> None:
    first, second, _ = versions()
    base = Base()
    kept.begin()
    work.received(kept, work.bucket(base, first, {}))
    with pytest.raises(work.envelope.DeltaError, match="twice in one update"):
        work.received(kept, work.bucket(base, second, {}))
    kept.begin()
    kept.agree(0, lambda numbers: [numbers])
    assert same(work.received(kept, work.bucket(base, second, {})), second)


def test_another_form_under_a_name_is_another_tensor(work, kept) -> None:
    base = Base()
    for tensor in (some((40, 40), torch.bfloat16), some((80, 40), torch.bfloat16), torch.ones(3)):
        assert same(pushed(work, kept, base, {"w": tensor}, **kept.digests), {"w": tensor})
        assert kept.digests == digests({"w": tensor})


def test_a_bucket_for_two_models_of_a_process_is_made_once(work, kept) -> None:
    first, second, third = versions()
    base, target, draft = Base(), object(), object()
    for tensors in (first, second, third):
        kept.begin()
        sealed = work.bucket(base, tensors, kept.digests)
        for model in (target, draft):
            assert same(work.received(kept, sealed, model), tensors)
        kept.end()
    assert kept.digests == digests(third)


def test_a_bucket_in_the_memory_of_the_last_one_is_another(work, kept) -> None:
    """Though its header is the same: the same model gets it."""
    first, second, _ = versions()
    memory, other = (work.sealed(Base(), tensors, {}) for tensors in (first, second))
    for sent, expected in ((memory, first), (other, second)):
        kept.begin()
        for (_, into), (_, part) in zip(memory, sent, strict=True):
            into.copy_(part)
        assert same(work.received(kept, work.envelope.unseal(memory)), expected)
        assert kept.digests == digests(expected)
        kept.end()


def test_what_came_otherwise_is_not_held_and_the_memory_of_nothing_is_given_back(
    work, kept, plugin
) -> None:
    first, second, _ = versions()
    base = Base()
    pushed(work, kept, base, first)
    [(_, size)] = work.files()
    assert size > num_bytes(first)

    model, record = torch.nn.Module(), plugin.Record(kept)
    model.load_weights = lambda weights: [name for name, _ in weights]
    record.begin(model)
    model.load_weights([("w0", torch.ones(1)), ("w5", torch.ones(1))])
    record.end()
    assert kept.digests.keys() == first.keys() - {"w0", "w5"}
    record.begin(model)
    model.load_weights(iter(first.items()))
    record.end()
    assert kept.digests == {} and work.files() == []
    kept.agree(0, lambda numbers: [numbers])
    assert same(pushed(work, kept, base, second, **kept.digests), second)
    assert kept.digests == digests(second)


def test_a_record_is_of_the_tensors_that_changes_make(work, kept, plugin) -> None:
    """As whole ones: digests, what was taken, what was written."""
    first, second, _ = versions()
    model, record, base = torch.nn.Module(), plugin.Record(kept), Base()
    own = {name: torch.zeros_like(tensor) for name, tensor in first.items() if name != "w2"}
    for name, tensor in own.items():
        model.register_buffer(name, tensor)

    def load(weights: object) -> None:
        for name, tensor in weights:
            if name in own:
                own[name].copy_(tensor)

    model.load_weights = load
    for tensors in (first, second):
        record.begin(model)
        model.load_weights(work.sealed(base, tensors, kept.digests))
        record.end()
        assert record.digests == kept.digests == digests(tensors)
        assert record.taken == first.keys() - {"w2"}
        assert record.written == {name for name, tensor in own.items() if tensor.numel()}
        assert same(own, {name: tensors[name] for name in own})


@pytest.mark.parametrize(
    "change, said",
    [
        ({"names": ["a"]}, "argument"),
        ({"deltas": [[7, "x"], None]}, "bytes; its header tells of"),
        ({"deltas": [[99, "x"], None]}, "a: 99 bytes at 0 of 28"),
        ({"deltas": [[-1, "x"], None]}, "a: -1 bytes"),
        ({"dtypes": ["bfloat16", "bits"]}, "bits"),
        ({"shapes": None}, "NoneType"),
    ],
)
def test_an_envelope_that_does_not_add_up_is_refused(work, change, said) -> None:
    good = {"names": ["a", "b"], "dtypes": ["bfloat16", "int32"], "shapes": [[2, 3], [4]]}
    good["deltas"] = [None, None]
    flat = torch.arange(28, dtype=torch.uint8)

    def unseal(told: object) -> object:
        header = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        return work.envelope.unseal([("megarl.delta", flat), ("megarl.delta.header", header)])

    a, b = unseal(good).entries
    assert (a.whole().view(torch.uint8).view(-1).tolist(), a.shape) == (list(range(12)), (2, 3))
    assert b.whole().view(torch.uint8).tolist() == list(range(12, 28))
    with pytest.raises(work.envelope.DeltaError, match=said):
        unseal({**good, **change})


def test_only_the_file_that_was_meant_is_opened(work) -> None:
    memory = work.node_memory.NodeMemory.create()
    pid, descriptor, *nonce = memory.address
    assert work.node_memory.NodeMemory.open([pid, descriptor, nonce[0], nonce[1] ^ 1]) is None
    assert work.node_memory.NodeMemory.open([pid, 10**6, *nonce]) is None
    assert work.node_memory.NodeMemory.open([0, 0, 0, 0]) is None
    with Path("/dev/null").open("rb") as other:
        assert work.node_memory.NodeMemory.open([pid, other.fileno(), *nonce]) is None
    again = work.node_memory.NodeMemory.open(memory.address)
    assert again is not None and len({inode for inode, _ in work.files()}) == 1
    del again, memory
    assert work.files() == []


def test_memory_is_taken_before_anything_is_written_to_it(work, spared) -> None:
    memory = work.node_memory.NodeMemory.create()
    part = memory.grow(2**22, takes=True, deadline_s=1.0)
    assert part.shape == (2**22,) and part.dtype == torch.uint8
    assert [size >= 2**22 for _, size in work.files()] == [True]


GB = 2**30


@pytest.mark.parametrize(
    "lines, groups, expected",
    [
        ("0::/", {}, 8 * GB),
        ("0::/a/b", {"a": (5 * GB, 2 * GB, GB), "a/b": ("max", GB, 0)}, 4 * GB),
        ("0::/a/b", {"a": (9 * GB, 0, 0), "a/b": (3 * GB, GB, 0)}, 2 * GB),
        ("0::/", {".": (20 * GB, GB, 0)}, 8 * GB),
        ("4:memory:/a\n0::/", {"memory/a": (3 * GB, GB, 5)}, 2 * GB + 5),
        ("4:cpu,memory:/not/seen", {"memory": (3 * GB, GB, 0)}, 2 * GB),
        ("4:cpu:/a", {"memory/a": (GB, 0, 0)}, 8 * GB),
    ],
)
def test_what_is_available_is_the_least_that_machine_and_groups_leave(
    work, tmp_path, lines, groups, expected
) -> None:
    for path in ("proc/self", "sys/fs/cgroup"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(lines + "\n")
    for path, (limit, usage, cached) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        first = path.startswith("memory")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        names = names if first else ("memory.max", "memory.current", "inactive_file")
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")
    assert work.node_memory.available(tmp_path) == expected
