"""Lets an SGLang server say what it received in the last weight update: a digest per tensor.

A plugin for SGLang 0.5.23, installed into the server's environment, on GPU or CPU alike:

    pip install --no-deps megarl/sync/sglang_plugin

SGLang loads it by itself from then on. It needs torch and the standard library, not megarl.

1. `/begin_weight_update` empties the record of each model runner. Until `/end_weight_update`, each
   tensor is recorded under its name as the model's `load_weights` takes it, whichever way it came
   (process group, tensors in the request, flattened or not, disk). So a name in the record has
   both arrived and been handed to the model; what the model did not take is not there.
2. `/weights_checker {"action": "digest", "selector": "target"}` replies with the record, in the
   form SGLang has for checksums, one entry per tensor-parallel rank:

       {"success": true, "message": "Success.",
        "ranks": [{"checksums": {"model.norm.weight": "<sha256>", ...},
                   "per_gpu_checksum": "<sha256 over the names and digests>",
                   "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, ...}]}],
        "per_engine_checksum": "<sha256 over the ranks>"}

   It stays readable until the next begin. Before the first one it is an error (HTTP 400), as it is
   without this plugin: nobody can take an absent record for agreement. A speculative draft model
   has its own record; with selector "all" its names begin with "draft.".
3. A digest covers dtype, shape and bytes, see `tensor_digest`; the trainer computes the same.

Cost: every rank hashes all it receives, on the CPU, about 1 GB/s a thread, with up to 8 threads.
`/weights_checker {"action": "digest_skip"}` leaves the next update unrecorded, for trainers that
verify only some of them.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 4 * _THREADS  # tensors hashed ahead of the model's reading: enough to keep threads busy
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


@dataclass
class Record:
    """What one model runner received in the last update; `digests` is None if that is not known."""

    digests: dict[str, str] | None = None
    skip_next: bool = False


_records: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()  # by model runner


def activate() -> None:
    """The entry point: SGLang calls it in each of its processes, before a model is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.begin_weight_update", _begin, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", _end, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}.check_weights", _check, HookType.AROUND)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of `dtype|shape|` and then the bytes, row-major and little-endian, in hexadecimal: of
    `float32|[2, 3]|` and 24 bytes for a float32 tensor of shape [2, 3]."""
    return _hash(*_hashed_parts(tensor))


def _begin(begin: Callable[..., Any], updater: Any) -> Any:
    record = _records.setdefault(updater.get_model_runner(), Record())
    record.digests = None if record.skip_next else {}
    record.skip_next = False
    model = updater.get_model()
    _untap(model)
    if record.digests is not None:
        _tap(model, record.digests)
    return begin(updater)


def _end(end: Callable[..., Any], updater: Any, **options: Any) -> Any:
    try:
        return end(updater, **options)
    finally:
        _untap(updater.get_model())


def _check(
    check: Callable[..., Any], runner: Any, action: str, *, role: str, **options: Any
) -> Any:
    record = _records.setdefault(runner, Record())
    if action == "digest_skip":
        record.skip_next = True
        return None
    if action != "digest":
        return check(runner, action, role=role, **options)
    if record.digests is None:
        raise RuntimeError("digest: the last weight update was not recorded, or there was none")
    placement = runner._weight_checker._parallelism_info(role=role).model_dump()
    return {"checksums": dict(record.digests), "parallelism_info": placement}


def _tap(model: torch.nn.Module, digests: dict[str, str]) -> None:
    """Every load goes through `_recorded` until `_untap`."""
    load_weights: Callable[..., Any] = model.load_weights  # type: ignore[assignment]

    def load_recorded(weights: NamedTensors, *args: Any, **options: Any) -> Any:
        return load_weights(_recorded(weights, digests), *args, **options)

    model.load_weights = load_recorded  # type: ignore[assignment]  # hides the class's own method


def _untap(model: torch.nn.Module) -> None:
    model.__dict__.pop("load_weights", None)


def _recorded(weights: NamedTensors, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the tensors on. Each is hashed before the model gets it, for a loader may change it in
    place, and recorded only when the model takes it."""
    remaining = iter(weights)
    with ThreadPoolExecutor(_THREADS) as pool:
        while batch := list(itertools.islice(remaining, _AHEAD)):
            # The copy to the host happens here, on the stream that received the tensor.
            hashes = [pool.submit(_hash, *_hashed_parts(tensor)) for _, tensor in batch]
            for (name, tensor), digest in zip(batch, hashes, strict=True):
                digests[name] = digest.result()
                yield name, tensor


def _hashed_parts(tensor: torch.Tensor) -> tuple[bytes, Any]:
    header = f"{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|".encode()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return header, flat.cpu().numpy()


def _hash(header: bytes, content: Any) -> str:
    digest = hashlib.sha256(header)
    digest.update(content)
    return digest.hexdigest()
