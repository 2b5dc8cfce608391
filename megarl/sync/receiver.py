"""The receiving end of a weight push: tensors under Hugging Face names into the parameters of a
live module.

1. Files name every expert's matrices, a transformers module holds an expert layer as two stacked
   parameters: `experts.gate_up_proj [E, 2I, H]` (gate rows, then up rows) and `experts.down_proj
   [E, H, I]`. `hf_parameters` gives each name its own view, so nothing is copied twice and digests
   read what is served. Layers that a module stacks transposed (`[E, H, 2I]`, GPT-OSS) are in files
   as they are in the module.
2. Between `begin` and `end` every name arrives exactly once. Whatever does not fit (unknown name,
   other shape or dtype, a second time) is refused before a byte is received; what is missing at
   `end` is an error.
3. A receive ends by its deadline. After a failure its group is closed: it cannot be used again.
4. transformers' models end with their last layer. Layers behind it, for multi-token prediction, are
   part of a push all the same: they are received, digested for the sender to compare, and dropped.
"""

import contextlib
import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import SyncError
from megarl.ops import digest
from megarl.sync.group import join_group, leave_group
from megarl.sync.stream import dtype_name, dtype_of, num_bytes, unflatten
from megarl.types import TensorSpec

_LAYERS = "num_hidden_layers"
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_STACKED = re.compile(r"(?P<layer>.+\.experts)\.(?P<matrix>gate_up_proj|down_proj)")


def hf_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight of a transformers module under the name it has in files, as a view of the live
    tensor.

    A tied weight appears once, under its first name. Raises SyncError for an expert layout that is
    none of the two above (gate and up rows interleaved).
    """
    parameters: dict[str, torch.Tensor] = {}
    owners: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if owners.setdefault(id(tensor), name) != name:
            continue
        match = _STACKED.fullmatch(name)
        if match is None or tensor.dim() != 3 or _as_in_files(module, match["layer"]):
            parameters[name] = tensor.data
        else:
            parameters.update(_split_experts(match["layer"], match["matrix"], tensor.data))
    return parameters


class ModelReceiver:
    """Weight groups, the update in progress, and the module they write to."""

    def __init__(self, module: torch.nn.Module, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` bounds joining a group and every receive in it, unless the join names its
        own."""
        self._parameters = hf_parameters(module)
        self._timeout_s = timeout_s
        self._layers: int | None = getattr(getattr(module, "config", None), _LAYERS, None)
        self._dropped: dict[str, str] = {}  # digests by name, of the present or the last update
        self._groups: dict[str, tuple[dist.ProcessGroup, str, float]] = {}
        self._pending: set[str] = set()
        self._open = False

    @torch.no_grad()
    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, read back from the module, and as it came of
        those that the module does not have.
        """
        held = {name: digest(tensor) for name, tensor in self._parameters.items()}
        return held | self._dropped

    def join_group(
        self,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Returns when every member is there; SyncError at the deadline."""
        if name in self._groups:
            raise SyncError(f"weight group {name!r} exists already; leave it first")
        timeout_s = timeout_s or self._timeout_s
        host = f"[{address.strip('[]')}]" if ":" in address else address
        group = join_group(
            f"{host}:{port}",
            rank=rank,
            world_size=world_size,
            group_name=name,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._groups[name] = (group, backend, timeout_s)

    def leave_group(self, name: str) -> None:
        group, _, _ = self._group(name)
        del self._groups[name]
        leave_group(group)

    def begin(self) -> None:
        """Opens an update; one that was left open is given up, and everything must arrive anew."""
        self._pending = set(self._parameters)
        self._dropped = {}
        self._open = True

    def receive(self, specs: Sequence[TensorSpec], *, group: str, flattened: bool) -> None:
        """Takes part in the sender's broadcasts (group rank 0) and writes what arrives.

        `flattened`: one broadcast of the whole bucket's bytes; otherwise one of every tensor.
        """
        if not self._open:
            raise SyncError("weights: no update is open; begin one first")
        process_group, backend, timeout_s = self._group(group)
        self._check(specs)
        device = self._device() if backend == "nccl" else torch.device("cpu")
        if flattened:
            buffers = [torch.empty(num_bytes(specs), dtype=torch.uint8, device=device)]
        else:
            buffers = [
                torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=device) for spec in specs
            ]
        try:
            _broadcasts(buffers, process_group, timeout_s)
        except RuntimeError as error:
            self._drop(group)
            raise SyncError(
                f"weight group {group!r}: {len(specs)} tensors from {specs[0].name} on did not "
                f"arrive within {timeout_s:g} s, the group is closed: {error}"
            ) from error
        if flattened:
            buffers = [tensor for _, tensor in unflatten(buffers[0], specs)]
        self._write(specs, buffers)

    def end(self) -> None:
        """Closes the update. Raises SyncError when a weight has not been received."""
        if not self._open:
            raise SyncError("weights: no update is open; begin one first")
        self._open = False
        if self._pending:
            first = ", ".join(sorted(self._pending)[:3])
            raise SyncError(
                f"weights: {len(self._pending)} of {len(self._parameters)} were not received "
                f"({first}{', ...' if len(self._pending) > 3 else ''})"
            )

    def close(self) -> None:
        for name in list(self._groups):
            self._drop(name)

    def _group(self, name: str) -> tuple[dist.ProcessGroup, str, float]:
        if name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise SyncError(f"weight group: found {name!r}; joined: {known}")
        return self._groups[name]

    def _drop(self, name: str) -> None:
        group, _, _ = self._groups.pop(name)
        with contextlib.suppress(RuntimeError, ValueError):  # it is broken already
            leave_group(group)

    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _check(self, specs: Sequence[TensorSpec]) -> None:
        if not specs:
            raise SyncError("weights: an empty bucket")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise SyncError("weights: a name twice in one bucket")
        for spec in specs:
            have = self._parameters.get(spec.name)
            behind = have is None and self._is_behind(spec.name)
            if have is None and not behind:
                raise SyncError(f"weights: {spec.name} is not a weight of this model")
            if spec.name in self._dropped or not (behind or spec.name in self._pending):
                raise SyncError(f"weights: {spec.name} was received already in this update")
            if have is None:
                continue
            found, accepted = (spec.shape, spec.dtype), (tuple(have.shape), dtype_name(have.dtype))
            if found != accepted:
                raise SyncError(f"weights: {spec.name}: found {found}; accepted: {accepted}")

    @torch.no_grad()
    def _write(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.name in self._parameters:
                self._parameters[spec.name].copy_(tensor)
                self._pending.discard(spec.name)
            else:
                self._dropped[spec.name] = digest(tensor)

    def _is_behind(self, name: str) -> bool:
        match = _OF_LAYER.match(name)
        return match is not None and self._layers is not None and int(match[1]) >= self._layers


def _broadcasts(
    buffers: Sequence[torch.Tensor], group: dist.ProcessGroup, timeout_s: float
) -> None:
    works = [dist.broadcast(b, group=group, group_src=0, async_op=True) for b in buffers]
    for work in works:
        work.wait(timedelta(seconds=timeout_s))


def _as_in_files(module: torch.nn.Module, layer: str) -> bool:
    experts = module.get_submodule(layer)
    if getattr(experts, "is_transposed", False):
        return True
    if not getattr(experts, "is_concatenated", True):
        raise SyncError(
            f"weights: {layer} stacks its experts in a layout that is not supported here"
        )
    return False


def _split_experts(layer: str, matrix: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of one stacked parameter under the per-expert names of files."""
    views: dict[str, torch.Tensor] = {}
    for index, expert in enumerate(stacked):
        if matrix == "down_proj":
            views[f"{layer}.{index}.down_proj.weight"] = expert
        else:
            half = expert.shape[0] // 2
            views[f"{layer}.{index}.gate_proj.weight"] = expert[:half]
            views[f"{layer}.{index}.up_proj.weight"] = expert[half:]
    return views
