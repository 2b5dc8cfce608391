"""Lets an SGLang server say what it received in the last weight update: a digest per tensor.

A plugin for SGLang 0.5.23, installed into the server's environment, on GPU or CPU alike:

    pip install --no-deps megarl/sync/sglang_plugin

SGLang loads it by itself from then on. It needs torch and the standard library, not megarl.

1. `/begin_weight_update` empties the record of each model runner. Until `/end_weight_update`, each
   tensor is recorded under its name as the model's `load_weights` takes it, whichever way it came
   (process group, tensors in the request, flattened or not, disk). So a name in the record has both
   arrived and been handed to the model; what the model never asked for is not there.
2. `/weights_checker {"action": "digest", "selector": "target"}` replies with the record, in the form
   SGLang has for checksums, one entry per tensor-parallel rank:

       {"success": true, "message": "Success.",
        "ranks": [{"checksums": {"model.norm.weight": "<sha256>", ...},
                   "per_gpu_checksum": "<sha256 over the names and digests>",
                   "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, ...}]}],
        "per_engine_checksum": "<sha256 over the ranks>"}

   It stays readable until the next begin. Before the first one it is an error (HTTP 400), as it is
   without this plugin: nobody can take an absent record for agreement. A speculative draft model
   has its own record; with selector "all" its names begin with "draft.".
3. A digest is sha256 over dtype, shape and bytes, see `tensor_digest`. The trainer computes the same.

Cost: every rank hashes all it receives, on the CPU, about 1 GB/s a thread over `_THREADS` threads,
while the server is paused. `/weights_checker {"action": "digest_skip"}` leaves the next update out of
the record, for trainers that verify only some of them.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch

_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 4 * _THREADS  # tensors hashed ahead of the model: enough to keep the threads busy

_COMPONENTS = "sglang.srt.model_executor.model_runner_components"


class Record:
    """What one model runner received between the last begin and its end."""

    def __init__(self) -> None:
        self.digests: dict[str, str] | None = None  # None: never asked to record, or told to skip
        self.skip_next = False


_records: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()  # model runner -> its record


def activate() -> None:
    """The entry point. SGLang calls it in each process, before it builds a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = f"{_COMPONENTS}.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.begin_weight_update", _begin, HookType.AROUND)
    HookRegistry.register(f"{updater}.end_weight_update", _end, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.check_weights", _check, HookType.AROUND
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of `dtype|shape|` and then the bytes in row-major order, little-endian, as hexadecimal:
    `float32|[2, 3]|` and 24 bytes for a float32 tensor of shape [2, 3]."""
    return _hash(_header(tensor), _host_bytes(tensor))
