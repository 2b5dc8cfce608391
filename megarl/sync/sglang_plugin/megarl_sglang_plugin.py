"""Lets an SGLang server say what it received in the last weight update: a digest per tensor.

A plugin for SGLang 0.5.23, installed into the server's environment, on GPU or CPU alike:

    pip install --no-deps megarl/sync/sglang_plugin

SGLang loads it by itself from then on. It needs torch and the standard library, not megarl; where
megarl is installed too, its compiled digest is used.

1. `/begin_weight_update` empties the record of each model runner. Until `/end_weight_update`, each
   tensor is recorded under its name as the model's `load_weights` takes it, whichever way it came
   (process group, tensors in the request, flattened or not, disk). So a name in the record has
   both arrived and been handed to the model; what the model did not take is not there.
2. `/weights_checker {"action": "digest", "selector": "target"}` replies with the record, in the
   form SGLang has for checksums, one entry per tensor-parallel rank:

       {"success": true, "message": "Success.",
        "ranks": [{"checksums": {"model.norm.weight": "<digest>", ...},
                   "per_gpu_checksum": "<sha256 over the names and digests>",
                   "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, ...}]}],
        "per_engine_checksum": "<sha256 over the ranks>"}

   It stays readable until the next begin. Before the first one it is an error (HTTP 400), as it is
   without this plugin: nobody can take an absent record for agreement. A speculative draft model
   has its own record; with selector "all" its names begin with "draft.".
3. A digest covers dtype, shape and bytes. It is that of `megarl.ops.digest`, which says what it
   finds and with what certainty; `torch_partial` is the same sum in plain torch.

Cost: every rank digests all it receives, on the device where that lies: a dozen passes over it in
plain torch, one with megarl's operator, and 100 MB of memory on the way.
`/weights_checker {"action": "digest_skip"}` leaves the next update unrecorded, for trainers that
verify only some of them.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

_digest_partial: Callable[[torch.Tensor], torch.Tensor] | None = None
with contextlib.suppress(ImportError):
    from megarl.ops import digest_partial as _digest_partial

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_AHEAD = 32  # tensors digested ahead of the model's reading: a GPU is waited for once in so many
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
    """The first 16 hex digits of sha256 over `dtype|shape|partial`, the partial digest in 16."""
    return _finish(_partial(tensor), tensor)


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
    """Passes the tensors on. Each is digested before the model gets it, for a loader may change it
    in place, and recorded only when the model takes it."""
    remaining = iter(weights)
    while batch := list(itertools.islice(remaining, _AHEAD)):
        # All are queued, on the stream that received them, before the first is waited for.
        partials = [_partial(tensor) for _, tensor in batch]
        for (name, tensor), partial in zip(batch, partials, strict=True):
            digests[name] = _finish(partial, tensor)
            yield name, tensor


# --- the digest -----------------------------------------------------------------------------------

_PRIME = (1 << 61) - 1
_BLOCK_WORDS = 1024
_WORD_KEY_SEED = int.from_bytes(b"megarl_C", "big")
_BLOCK_KEY_SEED = int.from_bytes(b"megarl_R", "big")


def _partial(tensor: torch.Tensor) -> torch.Tensor:
    return (_digest_partial or torch_partial)(tensor.detach())


def _finish(partial: torch.Tensor, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}|{list(tensor.shape)}|{int(partial):016x}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def torch_partial(tensor: torch.Tensor) -> torch.Tensor:
    """Of the tensor's bytes, row-major: i64 [] on its device.

    Word w is bytes 4w..4w+3, little-endian; sums are modulo p = 2^61 - 1:

        sum over the bytes g, w = g div 4:
            (byte + 1) * 256^(g mod 4) * C[w mod 1024] * R(w div 1024)
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    keys = _word_keys(raw.device)
    sums = []
    for part in raw.split((32 if raw.device.type == "cpu" else 2048) * 4 * _BLOCK_WORDS):
        words = _words(part) + _words(torch.ones_like(part))
        # A product of a half word and a key has 49 bits, a block's sum 59.
        sums.append((((words & 0xFFFF) * keys).sum(-1), ((words >> 16) * keys).sum(-1)))
    low, high = (torch.cat(halves) for halves in zip(*sums, strict=True))
    blocks = torch.arange(low.numel(), device=raw.device)
    block_keys = (_splitmix64(_BLOCK_KEY_SEED + blocks) >> 3 & _PRIME) % (_PRIME - 1) + 1
    products = _multiply(_mod(_mod(low) + _rotate(_mod(high), 16)), block_keys)
    # In halves, so that adding them up does not overflow.
    low, high = (products & 0x7FFFFFFF).sum(), (products >> 31).sum()
    return _mod(_mod(low) + _rotate(_mod(high), 31))


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Filled up with zeros to whole blocks: i64 [blocks, 1024]."""
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % (4 * _BLOCK_WORDS)))
    return padded.view(torch.int32).view(-1, _BLOCK_WORDS).long() & 0xFFFFFFFF


def _mod(x: torch.Tensor) -> torch.Tensor:
    x = (x & _PRIME) + (x >> 61)
    return torch.where(x >= _PRIME, x - _PRIME, x)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Times 2^bits, modulo p."""
    return ((x & ((1 << (61 - bits)) - 1)) << bits) | (x >> (61 - bits))


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In halves of 31 bits: every product stays below 2^62. And 2^62 is 2."""
    a0, a1, b0, b1 = a & 0x7FFFFFFF, a >> 31, b & 0x7FFFFFFF, b >> 31
    middle = _mod(_mod(a0 * b1) + _mod(a1 * b0))
    return _mod(_mod(_mod(a0 * b0) + _mod(2 * a1 * b1)) + _rotate(middle, 31))


@cache
def _word_keys(device: torch.device) -> torch.Tensor:
    words = torch.arange(_BLOCK_WORDS, device=device)
    return _splitmix64(_WORD_KEY_SEED + words) >> 32 & 0xFFFFFFFF


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """On the bits of i64: additions and products wrap, zeros are shifted in."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & ((1 << 33) - 1))
