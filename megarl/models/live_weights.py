"""A server's weights: the parameters of a live transformers module under the names of files, and
new ones written into them.

1. Files name every expert's matrices, a transformers module holds an expert layer as two stacked
   parameters: `experts.gate_up_proj [E, 2I, H]` (gate rows, then up rows) and `experts.down_proj
   [E, H, I]`. `hf_parameters` gives each name its own view, so nothing is copied twice and digests
   read what is served. Layers that a module stacks transposed (`[E, H, 2I]`, GPT-OSS) are in files
   as they are in the module.
2. A weight in FP8 blocks is two tensors, `X` (e4m3) and `X_scale_inv` (f32). They are kept as they
   came, beside the module, whose parameter is what they stand for in its own dtype.
3. Between `begin` and `end` every name is written exactly once. Whatever does not fit (unknown
   name, other shape or dtype, a second time) is refused by `check`, before a byte is received; what
   is missing at `end` is an error.
4. A tensor is digested as it is written: what has just been put in its place is read back from
   there, block by block, while it is in the processor's cache (`ops.digest_copy_`). `digests` are
   these records, of one update; `known` are those of what is held, whatever updates it came in. Of
   weights that the module was built with there are none: they are read when first asked for.
5. transformers' models end with their last layer. Layers behind it, for multi-token prediction, are
   part of an update all the same: they are digested as they came, and dropped.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from megarl.errors import SyncError
from megarl.models.hf_fp8 import SCALE, Fp8Blocks
from megarl.ops.digest import digest, digest_copy_, finish
from megarl.ops.fp8_block import fp8_block_dequant
from megarl.types import TensorSpec

T = TypeVar("T")

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


class LiveWeights:
    """What a server holds, by the names of files, and the update in progress.

    ``held``: every tensor as it is received and digested. ``codes``: names of those in FP8 blocks,
    of ``blocks``. ``digest_seconds``: spent on digests so far, and on writing what they are of.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        blocks: Fp8Blocks | None = None,
        codes: Collection[str] = (),
    ) -> None:
        """``codes``: names of a folder's, of which layers behind the last do not count. What they
        are is not known before an update. Raises SyncError where they are no weights of the module.
        """
        self._layers: int | None = getattr(getattr(module, "config", None), _LAYERS, None)
        self._values = hf_parameters(module)
        self.blocks = blocks
        self.codes = frozenset(name for name in codes if not self.is_behind(name))
        self.held = self._places()
        self.digest_seconds = 0.0
        self._known: dict[str, str] = {}  # digests of what is held
        self._records: dict[str, str] | None = None  # of the present or the last update
        self._pending: set[str] = set()
        self._open = False

    @property
    def device(self) -> torch.device:
        return next(iter(self.held.values())).device

    def names(self) -> Iterator[str]:
        """Of weights; scales have none of their own."""
        return iter(self._values)

    @torch.no_grad()
    def digests(self) -> dict[str, str]:
        """Of every weight that the last update wrote, or is writing; before the first, of those
        that there are.
        """
        if self._records is None:
            self._known = {n: self._timed(digest, t) for n, t in self.held.items()}
            self._records = dict(self._known)
        return dict(self._records)

    def known(self) -> dict[str, str]:
        """Digests of what is held, as far as it has been digested; nothing is read."""
        return dict(self._known)

    def begin(self) -> None:
        """Opens an update; one that was left open is given up, and everything must come anew."""
        self._pending = set(self.held)
        self._records = {}
        self._open = True

    def forget(self) -> None:
        """The memory has lost what it held: nothing is known of it, and no update is open."""
        self._known, self._records, self._open = {}, {}, False

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Whether these may be written next, together. Raises SyncError."""
        if not self._open:
            raise SyncError("weights: no update is open; begin one first")
        if not specs:
            raise SyncError("weights: an empty bucket")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise SyncError("weights: a name twice in one bucket")
        for spec in specs:
            have = self.held.get(spec.name)
            if have is None and not self.is_behind(spec.name):
                raise SyncError(f"weights: {spec.name} is not a weight of this model")
            if spec.name in (self._records or {}):
                raise SyncError(f"weights: {spec.name} was received already in this update")
            if have is None:
                continue
            found, accepted = (spec.shape, spec.dtype), (tuple(have.shape), _name(have.dtype))
            if found != accepted:
                raise SyncError(f"weights: {spec.name}: found {found}; accepted: {accepted}")

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor that ``check`` has passed. Codes become values once their scales are there."""
        assert self._records is not None, name
        into = self.held.get(name)
        if into is None:
            self._records[name] = self._timed(digest, tensor)
            return
        self._known.pop(name, None)  # should it fail half-way
        partial = self._timed(digest_copy_, into, tensor, read_back=True)
        self._written(name, finish(partial, into.dtype, into.shape))

    @torch.no_grad()
    def change(self, name: str, alter: Callable[[torch.Tensor, str | None], object]) -> None:
        """As ``write``, where ``alter(what is held, its digest if known)`` makes the new tensor of
        it in place. If that raises, nothing is known of it any more.
        """
        place = self.held[name]
        alter(place, self._known.pop(name, None))
        self._written(name, self._timed(digest, place))

    def end(self) -> None:
        """Closes the update. Raises SyncError when a weight has not been received."""
        if not self._open:
            raise SyncError("weights: no update is open; begin one first")
        self._open = False
        if self._pending:
            first = ", ".join(sorted(self._pending)[:3])
            raise SyncError(
                f"weights: {len(self._pending)} of {len(self.held)} were not received "
                f"({first}{', ...' if len(self._pending) > 3 else ''})"
            )

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] that the codes and scales of ``codes`` stand for."""
        assert self.blocks is not None, name
        scales = self.held[name + SCALE]
        return fp8_block_dequant(self.held[name], scales, block=self.blocks.block, dtype=dtype)

    def is_behind(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the module's last."""
        match = _OF_LAYER.match(name)
        return match is not None and self._layers is not None and int(match[1]) >= self._layers

    def _written(self, name: str, its_digest: str) -> None:
        assert self._records is not None, name
        self._known[name] = self._records[name] = its_digest
        self._pending.discard(name)
        weight = name.removesuffix(SCALE)
        if weight in self.codes and not {weight, weight + SCALE} & self._pending:
            self._values[weight].copy_(self.values(weight, self._values[weight].dtype))

    def _places(self) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        for name, view in self._values.items():
            if name not in self.codes:
                held[name] = view
                continue
            assert self.blocks is not None, name
            grid = self.blocks.scales_shape(tuple(view.shape))
            held[name] = torch.empty(view.shape, dtype=torch.float8_e4m3fn, device=view.device)
            held[name + SCALE] = torch.empty(grid, dtype=torch.float32, device=view.device)
        if unknown := sorted(self.codes - held.keys()):
            raise SyncError(f"weights: {unknown[0]} is in FP8, but is not a weight of this model")
        return held

    def _timed(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        start = time.perf_counter()
        found = function(*args, **options)
        self.digest_seconds += time.perf_counter() - start
        return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
