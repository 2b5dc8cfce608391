"""Recorded rollouts come back bit for bit, and a file from elsewhere runs nothing."""

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.recorded import (
    checked_routing,
    most_bytes,
    read_samples,
    recorded_path,
    recorded_steps,
    write_samples,
)
from megarl.errors import DataError
from megarl.types import RoutingShape, Sample, VersionSpan


def routing(rng: np.random.Generator, tokens: int, experts: int) -> Any:
    """Two different experts of each of three layers."""
    first = rng.integers(0, experts, (tokens, 3))
    other = (first + rng.integers(1, experts, (tokens, 3))) % experts
    return np.stack([first, other], -1)


def sample(length: int, **changes: Any) -> Sample:
    rng = np.random.default_rng(length)
    fields: dict[str, Any] = {
        "prompt_id": f"prompt é {length}",
        "group": length,
        "index": 1,
        "tokens": rng.integers(0, 1000, length, np.int32),
        "mask": rng.random(length) < 0.5,
        "rollout_logprobs": rng.standard_normal(length).astype(np.float32),
        "rewards": rng.standard_normal(2).astype(np.float32),
        "correct": True,
        "truncated": False,
        "version_spans": (VersionSpan(3, 0, 2), VersionSpan(4, 2, length)),
        "routing": routing(rng, length - 1, 128).astype(np.uint8),
    }
    return Sample(**{**fields, **changes})


def assert_same(a: Sample, b: Sample) -> None:
    for field in dataclasses.fields(Sample):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert left.shape == right.shape, field.name
            assert left.tobytes() == right.tobytes(), field.name
        else:
            assert type(left) is type(right), field.name
            assert left == right, field.name


SAMPLES = [
    sample(9),
    sample(5, routing=None, version_spans=()),
    sample(2, correct=False, truncated=True, rewards=np.zeros(0, np.float32)),
    sample(6, rollout_logprobs=np.asarray([np.nan, -np.inf, -0.0, 1, 2, 3], np.float32)),
    sample(
        8,
        trajectory=0,
        step_rewards=np.asarray([np.nan, -1, 0.5], np.float32),
        step_ends=np.asarray([2, 2, 7], np.int32),
        values=np.arange(8, dtype=np.float32),
        ref_logprobs=-np.arange(8, dtype=np.float32),
    ),
    sample(
        4,
        trajectory=7,
        step_rewards=np.zeros(0, np.float32),
        step_ends=np.zeros(0, np.int32),
    ),
    sample(7, routing=routing(np.random.default_rng(0), 6, 256).astype(np.uint16)),
    sample(3, ref_logprobs=np.asarray([-0.0, np.nan, 1], np.float32)),
]
# Arrays of a file of format 1: without the fields that came with format 2.
FORMAT_2_ROUTING = ("routing_shape", "routed", "routing")
FORMAT_1 = {
    *("format", "prompt_id", "group", "index", "correct", "truncated", "length"),
    *("tokens", "mask", "rollout_logprobs", "num_rewards", "rewards", "num_spans", "spans"),
    *("routing_shape", "routed", "routing"),
}


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_samples_come_back_bit_for_bit(tmp_path: Path, count: int) -> None:
    path = recorded_path(tmp_path / "rollouts", 7)
    write_samples(path, SAMPLES[:count])
    back = read_samples(path)
    assert len(back) == count
    for a, b in zip(SAMPLES, back, strict=False):
        assert_same(a, b)
    assert [p.name for p in path.parent.iterdir()] == ["step_7.npz"]


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("longer", [0, 3000])
def test_a_file_is_no_larger_than_is_foretold(tmp_path: Path, count: int, longer: int) -> None:
    """Of long samples with ids that nothing packs, it is nearly so large."""
    samples = SAMPLES[:count]
    if longer:
        many = routing(np.random.default_rng(0), longer - 1, 65536).astype(np.uint16)
        samples = [sample(longer, routing=many) for _ in samples]
    path = recorded_path(tmp_path, 7)
    write_samples(path, samples)
    most, size = most_bytes(samples), path.stat().st_size
    assert size <= most == most_bytes([s.facts for s in samples])
    assert not longer or most < 1.5 * size
    assert most_bytes([]) == 0


def test_steps_are_found_in_their_order(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        write_samples(recorded_path(tmp_path, step), SAMPLES)
    (tmp_path / "step_x.npz").touch()
    (tmp_path / ".step_3.npz.1.part").touch()
    assert recorded_steps(tmp_path) == [(s, tmp_path / f"step_{s}.npz") for s in (1, 2, 10)]


def test_what_several_collectors_recorded_is_one_step_in_the_order_of_its_groups(
    tmp_path: Path,
) -> None:
    """Three collectors of two rounds of three prompts each, two samples a prompt."""
    step = [dataclasses.replace(SAMPLES[k % 2], group=k // 2, index=k % 2) for k in range(12)]
    for part in (2, 0, 1):
        mine = [s for s in step if s.group % 3 == part]
        write_samples(recorded_path(tmp_path, 4, part, 3), mine)
    write_samples(recorded_path(tmp_path, 5), SAMPLES)
    first = tmp_path / "step_4.1-of-3.npz"
    assert recorded_steps(tmp_path) == [(4, first), (5, tmp_path / "step_5.npz")]
    for found, expected in zip(read_samples(first), step, strict=True):
        assert_same(found, expected)
    (tmp_path / "step_4.3-of-3.npz").unlink()
    with pytest.raises(DataError, match=r"step_4\.3-of-3\.npz is no file of recorded rollouts"):
        read_samples(first)


def test_a_step_that_was_recorded_twice_is_refused(tmp_path: Path) -> None:
    for parts in (1, 2):
        write_samples(recorded_path(tmp_path, 4, 0, parts), SAMPLES)
    with pytest.raises(DataError, match=r"step_4\.1-of-2\.npz and step_4\.npz; accepted: one"):
        recorded_steps(tmp_path)


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no recorded rollouts"):
        recorded_steps(tmp_path)


def flip(raw: bytearray) -> bytearray:
    raw[len(raw) // 2] ^= 1
    return raw


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: raw[:100], flip, lambda _: b""]
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: Any) -> None:
    path = recorded_path(tmp_path, 0)
    write_samples(path, SAMPLES)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(DataError, match=r"step_0\.npz"):
        read_samples(path)


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    path = recorded_path(tmp_path, 0)
    write_samples(path, SAMPLES)
    arrays = arrays_of(path)
    ragged = {
        "tokens",
        "rewards",
        "routing",
        "spans",
        *NEW,
        *(f"len_{name}" for name in NEW),
        "len_routing",
    }
    for name in ragged:
        np.savez(path, **{**arrays, name: arrays[name][:-1]})
        with pytest.raises(DataError, match=r"step_0\.npz"):
            read_samples(path)
    np.savez(path, **{**arrays, "format": np.asarray(5)})
    with pytest.raises(DataError, match="format 5; accepted: 1, 2, 3, 4"):
        read_samples(path)


NEW = ("trajectory", "step_rewards", "step_ends", "values", "ref_logprobs")


@pytest.mark.parametrize("name", NEW)
def test_lengths_that_fit_the_array_but_not_the_sample_are_refused(
    tmp_path: Path, name: str
) -> None:
    """One entry too many in one sample, one too few in another; a field that is missing."""
    path = recorded_path(tmp_path, 0)
    full = [SAMPLES[4], SAMPLES[4]]
    write_samples(path, full)
    arrays = arrays_of(path)
    assert len(read_samples(path)) == 2
    lengths = arrays[f"len_{name}"]
    np.savez(path, **{**arrays, f"len_{name}": lengths + np.asarray([1, -1])})
    with pytest.raises(DataError, match=r"step_0\.npz"):
        read_samples(path)
    np.savez(path, **{k: v for k, v in arrays.items() if k != f"len_{name}"})
    with pytest.raises(DataError, match=r"step_0\.npz"):
        read_samples(path)


def old_routing(samples: list[Sample]) -> dict[str, Any]:
    """As formats 1 and 2 had it: int32, with a shape for every sample."""
    there = [s.routing for s in samples if s.routing is not None]
    return {
        "routed": np.asarray([s.routing is not None for s in samples]),
        "routing_shape": np.asarray(
            [(0, 0, 0) if s.routing is None else s.routing.shape for s in samples], np.int64
        ),
        "routing": np.concatenate([r.ravel().astype(np.int32) for r in there]),
    }


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_older_formats_are_still_read(tmp_path: Path, version: int) -> None:
    path = recorded_path(tmp_path, 0)
    samples = [s for s in SAMPLES if s.routing is None or s.routing.dtype == np.uint8]
    write_samples(path, samples)
    arrays = {k: v for k, v in arrays_of(path).items() if k != "len_routing"}
    arrays |= old_routing(samples) | {"format": np.asarray(version)}
    assert set(arrays) > FORMAT_1
    np.savez(path, **{k: v for k, v in arrays.items() if version > 1 or k in FORMAT_1})
    lost = NEW if version == 1 else ()
    for a, b in zip(samples, read_samples(path), strict=True):
        assert_same(dataclasses.replace(a, **dict.fromkeys(lost)), b)


def test_routing_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """An expert twice, a negative one, and routing of more tokens than there are."""
    path = recorded_path(tmp_path, 0)
    write_samples(path, [SAMPLES[0]])
    arrays = {k: v for k, v in arrays_of(path).items() if k != "len_routing"}
    old = arrays | old_routing([SAMPLES[0]]) | {"format": np.asarray(2)}
    for at, value in ((0, old["routing"][1]), (5, -1), (3, 2**20)):
        damaged = old["routing"].copy()
        damaged[at] = value
        np.savez(path, **{**old, "routing": damaged})
        with pytest.raises(DataError, match=r"step_0\.npz.*expert"):
            read_samples(path)
    write_samples(path, [dataclasses.replace(SAMPLES[0], routing=SAMPLES[0].routing[1:])])
    with pytest.raises(DataError, match="routing of 7 tokens in a sample of 9"):
        read_samples(path)


@pytest.mark.parametrize(
    ("shape", "experts", "words"),
    [
        (None, 8, "has no routing; accepted: that of 3 MoE layers"),
        ((2, 2), 8, r"routing of \(MoE layers, experts a token\) \(2, 2\); accepted: \(3, 2\)"),
        ((4, 2), 8, r"\(4, 2\); accepted: \(3, 2\)"),
        ((3, 1), 8, r"\(3, 1\); accepted: \(3, 2\)"),
        ((3, 2), 6, "token 1, layer 0, choice 1: expert 6 of 6; accepted: different ones from 0"),
    ],
)
def test_routing_of_another_model_is_refused_by_sample(
    shape: tuple[int, int] | None, experts: int, words: str
) -> None:
    model = RoutingShape((False, True, True, True), topk=2, experts=experts)
    routing = None
    if shape is not None:
        at = np.arange(SAMPLES[0].length - 1)[:, None, None] % 2
        routing = np.broadcast_to(at + 5 * np.arange(shape[1]), (SAMPLES[0].length - 1, *shape))
        routing = routing.astype(np.uint8)
    wrong = dataclasses.replace(SAMPLES[0], routing=routing)
    with pytest.raises(DataError, match=words) as refusal:
        checked_routing([wrong], model, Path("step_3.npz"))
    assert "step_3.npz" in str(refusal.value) and wrong.name in str(refusal.value)


def test_routing_of_the_model_is_accepted() -> None:
    routing = np.tile(np.array([[5, 0], [1, 7]], np.uint8), (SAMPLES[0].length - 1, 1, 1))
    brought = dataclasses.replace(SAMPLES[0], routing=routing)
    model = RoutingShape((True, False, True), topk=2, experts=8)
    (found,) = checked_routing([brought], model, Path("step_3.npz"))
    assert_same(found, brought)


def test_samples_of_a_step_have_routing_of_one_type_whatever_their_files_had() -> None:
    """Before format 3 nobody wrote down how many experts there are: ids below 256 came as u8."""
    rng = np.random.default_rng(3)
    few, many = routing(rng, 8, 200).astype(np.uint8), routing(rng, 8, 300).astype(np.uint16)
    model = RoutingShape((True, True, True), topk=2, experts=300)
    given = [dataclasses.replace(SAMPLES[0], routing=ids) for ids in (few, many)]
    found = checked_routing(given, model, Path("step_3.npz"))
    assert [s.facts.routing for s in found] == [(3, 2, "uint16")] * 2
    assert [s.routing.tolist() for s in found if s.routing is not None] == [
        few.tolist(),
        many.tolist(),
    ]


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_the_file_is_not_opened(tmp_path: Path) -> None:
    path, marker = recorded_path(tmp_path, 0), tmp_path / "marker"
    np.savez(path, format=np.asarray([Bomb(marker)], dtype=object))
    with pytest.raises(DataError, match=r"step_0\.npz"):
        read_samples(path)
    path.write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(DataError, match=r"step_0\.npz"):
        read_samples(path)
    assert not marker.exists()
