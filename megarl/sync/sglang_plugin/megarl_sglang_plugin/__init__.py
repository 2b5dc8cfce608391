"""Lets an SGLang server say what it received and loaded in a weight update: a digest per tensor.

A plugin for SGLang 0.5.21 to 0.5.23, in the server's environment, on GPU or CPU alike:

    pip install --no-deps FOLDER        (`megarl sglang-plugin` prints the folder)

or, for a server that is not to be changed, with FOLDER in PYTHONPATH. SGLang loads it by itself
from then on. It needs torch and the standard library, not megarl.

1. `/begin_weight_update` empties the record of each model. Until `/end_weight_update`, each tensor
   is recorded under its name as the model's `load_weights` takes it, whichever way it came (process
   group, tensors in the request, flattened or not, files). `/update_weights_from_disk` and
   `/update_weights_from_ipc` outside of that are an update of their own.
2. `/weights_checker {"action": "digest", "selector": "target"}` replies with the record, in the
   form SGLang has for checksums, one entry per tensor-parallel rank:

       {"success": true, "message": "Success.",
        "ranks": [{"checksums": {"model.norm.weight": "<digest>", ...,
                                 "megarl:dropped": "[]", "megarl:seconds": "0.25"},
                   "per_gpu_checksum": "<sha256 over all that>",
                   "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, ...}]}],
        "per_engine_checksum": "<sha256 over the ranks>"}

   It stays readable until the next update. A speculative draft model has its own record; with
   selector "all" its names begin with "draft.". Where something is wrong with a rank's record,
   there is none of it, but `megarl:error` says what: that there was no update yet, or that the last
   one failed. (It is no HTTP error: SGLang tells only what the first rank raises, and waits for
   ever for the others where that one does not.)
3. A digest is of what arrived (digests.py). `megarl:dropped` is a JSON list of the names that
   arrived and of which no byte was written into the model on this rank (lineage.py), but for those
   that it rightly has no place for (excuses.py). A name that all ranks drop has not been loaded.
4. `{"action": "digest_snapshot"}` and `{"action": "digest_compare"}`, with the same push between
   them, prove that a push writes everything (proof.py). Neither is to be asked while an update is
   open. They reply likewise, with `megarl:error` or, to a snapshot, `megarl:unwritten`: a JSON list
   of the parameters into which the last update wrote nothing on this rank. What none did is stale.
   SGLang's own `snapshot`, `reset_tensors` and `compare` are as they were.
5. `{"action": "held"}` replies likewise, with digests of what changes can be made to; nothing is
   read for it. From then on the server keeps a copy, in host memory and once on a machine
   (shadow.py), of what comes in buckets of changes (envelope.py). The model gets whole tensors of
   that copy, and the record is of these. Tensor-parallel ranks wait for each other in it.
6. `/server_info` has the plugin's version in `internal_states[].megarl_plugin`. It names what the
   plugin did not find in this SGLang, if that is so.

Cost: every rank digests all it receives, on the device where that lies. To follow names takes some
0.1 ms a tensor, the first time that a load has these names, shapes and dtypes in this order, and
always for files. A snapshot has 16 characters a parameter. Who takes changes needs host memory for
the whole model, as it is sent.
"""

import json
import pkgutil
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from . import proof
from .digests import tensor_digest, torch_partial
from .envelope import DeltaError
from .excuses import dropped
from .records import Record, watched
from .shadow import DEADLINE_S, Shadow

VERSION = "0.3.0"

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

_records: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()  # by model runner
_snapshots: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
_spoiled: WeakSet[Any] = WeakSet()  # model runners of a proof that has not ended well
_shadow = Shadow()


def activate() -> None:
    """The entry point: SGLang calls it in each of its processes, before a model is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


# --- updates --------------------------------------------------------------------------------------


def _begin(begin: Callable[..., Any], updater: Any) -> Any:
    _record(updater.get_model_runner()).begin(updater.get_model())
    return begin(updater)


def _end(end: Callable[..., Any], updater: Any, **options: Any) -> Any:
    try:
        return end(updater, **options)
    finally:
        _record(updater.get_model_runner()).end()


def _join(join: Callable[..., Any], updater: Any, *args: Any, **options: Any) -> Any:
    """Groups of an earlier trainer, which did not live to have them left, are left."""
    before = set(updater._model_update_group)
    success, message = join(updater, *args, **options)
    if success:
        (name,) = updater._model_update_group.keys() - before or [""]
        for other in before:
            if _trainer_of(name) and _trainer_of(other) not in ("", _trainer_of(name)):
                updater.destroy_weights_update_group(other)
    return success, message


def _trainer_of(group: str) -> str:
    """The beginning of a name of ours; empty for others."""
    match = re.match(r"megarl-[^-]+-", group)
    return match[0] if match else ""


def _load(load: Callable[..., Any], updater: Any, *args: Any, **options: Any) -> Any:
    """An update in one call, or part of one that is open."""
    record = _record(updater.get_model_runner())
    alone = not record.open
    if alone:
        record.begin(updater.get_model())
    try:
        success, message = load(updater, *args, **options)
        _settle(updater.get_model())
    except DeltaError as error:  # SGLang would end for it, where tensors are in the request
        success, message = False, str(error)
    except BaseException:
        record.fail()
        raise
    if not success:
        record.fail()
    elif alone:
        record.end()
    return success, message


def _settle(model: Any) -> None:
    """What came in memory of the trainer's may be overwritten as soon as it hears that it came: no
    copy of it is queued any more.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _submit(submit: Callable[..., Any], **options: Any) -> Any:
    """Loaders that copy in other threads."""
    if options["use_async"]:
        options["func"] = watched(options["func"])
    return submit(**options)


# --- questions ------------------------------------------------------------------------------------


def _check(
    check: Callable[..., Any], runner: Any, action: str, *, role: str, **options: Any
) -> Any:
    if action not in _ANSWERS:
        return check(runner, action, role=role, **options)
    try:
        told = _ANSWERS[action](runner, _record(runner))
    except RuntimeError as error:
        told = {"megarl:error": f"{action}: {error}"}
    placement = runner._weight_checker._parallelism_info(role=role).model_dump()
    return {"checksums": told, "parallelism_info": placement}


def _digest(runner: Any, record: Record) -> dict[str, str]:
    if record.digests is None:
        raise RuntimeError("there was no weight update yet, or the last one failed")
    return record.digests | _told(runner, record)


def _held(runner: Any, record: Record) -> dict[str, str]:
    """Collective, as SGLang's own gathering of the replies is."""
    group = get_group()
    _shadow.agree(dist.get_rank(group), lambda numbers: exchange(numbers, group))
    return _shadow.digests | _told(runner, record)


def _told(runner: Any, record: Record) -> dict[str, str]:
    drafts = None
    if not runner.spec_algorithm.is_none():
        drafts = [r for other, r in _records.items() if other.is_draft_worker]
    lost = dropped(runner.model, record, drafts)
    return {"megarl:dropped": json.dumps(lost), "megarl:seconds": f"{record.seconds:.6f}"}


def _snapshot(runner: Any, record: Record) -> dict[str, str]:
    _require_closed(record)
    if record.digests is None:
        raise RuntimeError("there was no weight update yet, or the last one failed")
    _spoiled.add(runner)
    _snapshots[runner] = proof.remember(runner.model, record.written)
    return {"megarl:unwritten": json.dumps(proof.unwritten(runner.model, record.written))}


def _compare(runner: Any, record: Record) -> dict[str, str]:
    _require_closed(record)
    remembered = _snapshots.pop(runner, None)
    if remembered is None:
        raise RuntimeError("there is no digest_snapshot to compare with")
    proof.compare(runner.model, remembered)
    _spoiled.discard(runner)
    return {}


def _require_closed(record: Record) -> None:
    if record.open:
        raise RuntimeError("a weight update is open; end it first")


_ANSWERS = {
    "digest": _digest,
    "held": _held,
    "digest_snapshot": _snapshot,
    "digest_compare": _compare,
}


def _state(get_state: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    reply = get_state(scheduler, request)
    missing = [target.rpartition(".")[2] for target in _HOOKS if not _hooked(target)]
    reply.internal_state["megarl_plugin"] = " without ".join([VERSION, *missing])
    waits = bool(_spoiled) or any(record.open or record.failed for record in _records.values())
    reply.internal_state["megarl_waits"] = waits
    return reply


def _hooked(target: str) -> bool:
    """SGLang only logs a hook for which it finds no place."""
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def _record(runner: Any) -> Record:
    return _records.setdefault(runner, Record(_shadow))


def get_group() -> dist.ProcessGroup:
    """Of this server's tensor-parallel ranks, for host memory."""
    from sglang.srt.distributed import get_tp_group

    group: dist.ProcessGroup = get_tp_group().cpu_group
    return group


def exchange(
    numbers: list[int], group: dist.ProcessGroup, deadline_s: float = DEADLINE_S
) -> list[list[int]]:
    """As many of each rank, in order. Raises RuntimeError where one does not take part."""
    mine = torch.tensor(numbers)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(told, mine, group=group, async_op=True)
    work.wait(timedelta(seconds=deadline_s))
    return [each.tolist() for each in told]


_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_UPDATER}.init_weights_update_group": _join,
    f"{_UPDATER}.begin_weight_update": _begin,
    f"{_UPDATER}.end_weight_update": _end,
    f"{_UPDATER}.update_weights_from_disk": _load,
    f"{_UPDATER}.update_weights_from_ipc": _load,
    f"{_UPDATER}.update_weights_from_tensor": _load,
    f"{_UPDATER}.load_weights_from_distributed": _load,
    f"{_RUNNER}.check_weights": _check,
    "sglang.srt.model_loader.utils.maybe_executor_submit": _submit,
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": _state,
}

__all__ = ["VERSION", "activate", "tensor_digest", "torch_partial"]
