"""A step's samples on disk, for training again from the same rollouts (``run.mode: train_only``).

One ``step_N.npz`` a step, or one of every collector (``step_N.1-of-2.npz``), in numpy's format
without pickled objects: opening a file from elsewhere runs nothing. Ragged fields are stored end to
end, with their lengths beside them; a field that a sample may lack has length -1 where it does.
Routing is as ``ops/routing_codec.py`` encodes it.
"""

import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megarl.errors import DataError
from megarl.ops import routing_codec
from megarl.types import Known, RoutingShape, Sample, VersionSpan

FORMAT = 4
# That can be read. 1 has no field of _OPTIONAL, before 3 routing was i32, before 4 there were
# neither serials nor servers.
FORMATS = (1, 2, 3, FORMAT)
_FILE = re.compile(r"step_(\d+)(?:\.(\d+)-of-(\d+))?\.npz")
_PER_SAMPLE = ("group", "index", "correct", "truncated")
_PER_TOKEN = ("tokens", "mask", "rollout_logprobs")
_OPTIONAL = {
    "trajectory": np.int64,
    "step_rewards": np.float32,
    "step_ends": np.int32,
    "values": np.float32,
    "ref_logprobs": np.float32,
}

# Numbers of a sample and the header of its routing; names and headers of a file's arrays.
_SAMPLE_BYTES, _FILE_BYTES = 138, 16384


def recorded_path(folder: Path, step: int, part: int = 0, parts: int = 1) -> Path:
    """``part``: which of the step's collectors, counted from 0."""
    which = "" if parts == 1 else f".{part + 1}-of-{parts}"
    return Path(folder) / f"step_{step}{which}.npz"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **cast(Any, pack_samples(samples, deflate=True)))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_samples(path: Path) -> list[Sample]:
    """What ``write_samples`` wrote, bit for bit; of all collectors for the path of the first one,
    group after group. Raises DataError for a damaged or foreign file.
    """
    name = _FILE.fullmatch(path.name)
    if name is None or name[3] is None:
        return _read_file(path)
    step, parts = int(name[1]), int(name[3])
    paths = [recorded_path(path.parent, step, part, parts) for part in range(parts)]
    samples = [sample for part in paths for sample in _read_file(part)]
    return sorted(samples, key=lambda s: s.group)  # stable; a group is with one collector


def _read_file(path: Path) -> list[Sample]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if int(arrays["format"]) not in FORMATS:
            accepted = ", ".join(map(str, FORMATS))
            raise DataError(f"{path}: format {int(arrays['format'])}; accepted: {accepted}")
        return unpack_samples(arrays)
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"{path} is no file of recorded rollouts, or is damaged: {e}") from e


def recorded_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, its file, the first one of several) in the order of the steps. Raises DataError when
    there is none, or a step is recorded twice.
    """
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("step_*.npz")):
        name = _FILE.fullmatch(path.name)
        if name is None or (name[2] is not None and int(name[2]) != 1):
            continue
        step = int(name[1])
        if step in found:
            raise DataError(
                f"{folder} holds {found[step].name} and {path.name}; accepted: one recording of a "
                "step"
            )
        found[step] = path
    if not found:
        raise DataError(f"{folder} holds no recorded rollouts (step_N.npz)")
    return sorted(found.items())


def checked_routing(samples: Sequence[Sample], shape: RoutingShape, path: Path) -> list[Sample]:
    """``samples`` with their routing in the type of a model of this ``shape`` (files of before
    format 3 have it in the least that a sample's ids allow). Raises DataError, with the ``path``
    that they were read from, where it cannot be replayed in such a model.
    """
    accepted, found = (shape.num_moe_layers, shape.topk), []
    for s in samples:
        if s.routing is None:
            raise DataError(
                f"{path}: sample {s.name} has no routing; accepted: that of {accepted[0]} MoE "
                "layers, which moe.routing_replay=rollout replays"
            )
        if s.routing.shape[1:] != accepted:
            raise DataError(
                f"{path}: sample {s.name} has routing of (MoE layers, experts a token) "
                f"{s.routing.shape[1:]}; accepted: {accepted}, as the model has"
            )
        try:
            routing = routing_codec.narrow(s.routing, shape.experts)
        except routing_codec.CodecError as e:
            raise DataError(f"{path}: routing of sample {s.name}: {e}") from e
        found.append(replace(s, routing=routing))
    return found


def pack_samples(samples: Sequence[Sample], *, deflate: bool = False) -> dict[str, NDArray[Any]]:
    """Flat arrays from which ``unpack_samples`` makes equal samples. ``deflate``: routing may take
    longer to become smaller.
    """
    routing = [
        b"" if s.routing is None else routing_codec.encode(s.routing, deflate=deflate)
        for s in samples
    ]
    arrays: dict[str, NDArray[Any]] = {
        "format": np.asarray(FORMAT),
        "prompt_id": np.asarray([s.prompt_id for s in samples], dtype=np.str_),
        "length": np.asarray([len(s.tokens) for s in samples], np.int64),
        "num_rewards": np.asarray([len(s.rewards) for s in samples], np.int64),
        "rewards": _join([s.rewards for s in samples], np.float32),
        "num_spans": np.asarray([len(s.version_spans) for s in samples], np.int64),
        "spans": np.asarray(
            [(v.version, v.start, v.end) for s in samples for v in s.version_spans], np.int64
        ).reshape(-1, 3),
        "servers": np.asarray(
            [v.server for s in samples for v in s.version_spans] or [""], np.str_
        )[: sum(len(s.version_spans) for s in samples)],
        "serial": np.asarray([s.serial for s in samples], np.int64),
        "len_routing": np.asarray(
            [-1 if s.routing is None else len(routing[i]) for i, s in enumerate(samples)], np.int64
        ),
        "routing": np.frombuffer(b"".join(routing), np.uint8),
    }
    for name, dtype in zip(_PER_SAMPLE, (np.int64, np.int64, np.bool_, np.bool_), strict=True):
        arrays[name] = np.asarray([getattr(s, name) for s in samples], dtype)
    for name, dtype in zip(_PER_TOKEN, (np.int32, np.bool_, np.float32), strict=True):
        arrays[name] = _join([getattr(s, name) for s in samples], dtype)
    for name, optional in _OPTIONAL.items():
        parts = [_as_array(getattr(s, name)) for s in samples]
        arrays[name] = _join([part for part in parts if part is not None], optional)
        lengths = [-1 if part is None else len(part) for part in parts]
        arrays[f"len_{name}"] = np.asarray(lengths, np.int64)
    return arrays


def most_bytes(samples: Sequence[Known]) -> int:
    """What ``write_samples`` makes of them is no larger, however badly routing is packed."""
    tokens = sum(s.length * (4 + 1 + 4 + 4 * len(s.brings)) for s in samples)
    routing = sum(map(_routing_bytes, samples))
    spans = [span for s in samples for span in s.version_spans]
    text = 4 * len(samples) * max((len(s.prompt_id) for s in samples), default=0)
    text += 4 * len(spans) * max((len(span.server) for span in spans), default=0)
    rewards = sum(4 * len(s.rewards) for s in samples)
    steps = sum(8 * len(s.step_rewards) for s in samples if s.step_rewards is not None)
    numbers = _SAMPLE_BYTES * len(samples) + 24 * len(spans)
    return tokens + routing + text + rewards + steps + numbers + (_FILE_BYTES if samples else 0)


def _routing_bytes(sample: Known) -> int:
    if isinstance(sample, Sample):
        sample = sample.facts
    if sample.routing is None:
        return 0
    layers, topk, dtype = sample.routing
    return (sample.length - 1) * layers * topk * np.dtype(dtype).itemsize


def unpack_samples(arrays: dict[str, NDArray[Any]]) -> list[Sample]:
    """The inverse of ``pack_samples``. Raises ValueError or KeyError for arrays that do not belong
    together.
    """
    token_parts = {name: _cut(arrays[name], arrays["length"]) for name in _PER_TOKEN}
    rewards = _cut(arrays["rewards"], arrays["num_rewards"])
    spans = _spans(arrays)
    routing = _routing(arrays)
    optional = {name: _optional(arrays, name) for name in _OPTIONAL}
    serials = arrays.get("serial", np.full(len(arrays["length"]), -1))
    if len(serials) != len(arrays["length"]):
        raise ValueError(f"{len(serials)} serials of {len(arrays['length'])} samples")
    return [
        Sample(
            prompt_id=str(prompt_id),
            group=int(arrays["group"][i]),
            index=int(arrays["index"][i]),
            tokens=token_parts["tokens"][i],
            mask=token_parts["mask"][i],
            rollout_logprobs=token_parts["rollout_logprobs"][i],
            rewards=rewards[i],
            correct=bool(arrays["correct"][i]),
            truncated=bool(arrays["truncated"][i]),
            version_spans=spans[i],
            routing=routing[i],
            trajectory=None if (t := optional["trajectory"][i]) is None else int(t[0]),
            step_rewards=optional["step_rewards"][i],
            step_ends=optional["step_ends"][i],
            values=optional["values"][i],
            ref_logprobs=optional["ref_logprobs"][i],
            serial=int(serials[i]),
        )
        for i, prompt_id in enumerate(arrays["prompt_id"])
    ]


def _spans(arrays: dict[str, NDArray[Any]]) -> list[tuple[VersionSpan, ...]]:
    numbers = arrays["spans"]
    servers = arrays.get("servers", np.full(len(numbers), ""))
    whole = [
        VersionSpan(int(span[0]), int(span[1]), int(span[2]), str(server))
        for span, server in zip(numbers, servers, strict=True)
    ]
    ends = np.cumsum(arrays["num_spans"])
    if (arrays["num_spans"] < 0).any() or (ends[-1] if len(ends) else 0) != len(whole):
        raise ValueError(f"{len(whole)} version spans for {arrays['num_spans'].sum()}")
    starts = ends - arrays["num_spans"]
    return [tuple(whole[a:b]) for a, b in zip(starts, ends, strict=True)]


def _as_array(value: Any) -> NDArray[Any] | None:
    """A field of _OPTIONAL, a number as an array of one."""
    return np.asarray([value], np.int64) if isinstance(value, int) else value


def _routing(arrays: dict[str, NDArray[Any]]) -> list[NDArray[Any] | None]:
    """Of every sample. Raises ValueError where it is no routing, or not of the sample's tokens."""
    found: list[NDArray[Any] | None] = []
    if int(arrays["format"]) < 3:
        shapes = arrays["routing_shape"]
        for ids, shape, there in zip(
            _cut(arrays["routing"], shapes.prod(1)), shapes, arrays["routed"], strict=True
        ):
            experts = max(256, int(ids.max(initial=0)) + 1)
            found.append(routing_codec.narrow(ids.reshape(shape), experts) if there else None)
    else:
        lengths = arrays["len_routing"]
        messages = _cut(arrays["routing"], lengths.clip(min=0))
        for message, size in zip(messages, lengths, strict=True):
            found.append(routing_codec.decode(message.tobytes())[0] if size >= 0 else None)
    for routing, length in zip(found, arrays["length"], strict=True):
        if routing is not None and len(routing) != length - 1:
            raise ValueError(f"routing of {len(routing)} tokens in a sample of {length}")
    return found


def _optional(arrays: dict[str, NDArray[Any]], name: str) -> list[NDArray[Any] | None]:
    """A field of _OPTIONAL for every sample. Raises ValueError where its lengths cannot be."""
    count = len(arrays["prompt_id"])
    if int(arrays["format"]) == 1:
        return [None] * count
    lengths = arrays[f"len_{name}"]
    there = lengths >= 0
    expected: NDArray[Any] = {
        "trajectory": np.where(there, 1, -1),
        "step_rewards": lengths,
        "step_ends": arrays["len_step_rewards"],
    }.get(name, np.where(there, arrays["length"], -1))
    if len(lengths) != count or (lengths != expected).any():
        raise ValueError(f"{name} has lengths that do not fit the samples")
    parts = iter(_cut(arrays[name], lengths[there]))
    return [next(parts) if here else None for here in there]


def _join(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """End to end; an array of another dtype would not come back as it was."""
    assert all(part.dtype == dtype for part in parts), [part.dtype for part in parts]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _cut(array: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    if lengths.sum() != len(array) or (lengths < 0).any():
        raise ValueError(f"{len(array)} entries for lengths that sum to {lengths.sum()}")
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
