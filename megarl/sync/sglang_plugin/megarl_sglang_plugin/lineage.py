"""Which names' bytes a loader writes into a model: names are followed through what torch computes.

SGLang's loaders skip names that they do not know, in silence, and each finds its way from a name to
a parameter by code of its own: slices for a tensor-parallel rank, `torch.cat` of two names that
share a parameter, an index into stacked experts, other threads. So a load is watched from below:

1. Every tensor that a loader is given has a range of memory, and a name.
2. Every operation of torch that runs meanwhile reads ranges and writes some. What it writes is of
   all the names that it has read. Views have their memory's names by themselves.
3. What lies in a parameter or buffer of the model ends there: names that come to it are `taken`,
   and the parameter is `written`.

An operation's schema says what it reads and writes, so no list of operations is needed. Operations
that run in threads are seen if the thread runs them by `Watch.run`. Not seen: kernels that are
started without torch (Triton). A name that only reaches the model through one of these, though it
does reach it, is told of as not taken.

Nothing is changed, and nothing is computed twice: an operation runs as it would. It takes about
0.1 ms longer where it is no view.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Names = frozenset[str]
_NONE: Names = frozenset()
_OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_"}


class Memory:
    """Ranges of addresses and the names of what lies there. They do not overlap, and are sorted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[Names] = []

    def names(self, start: int, end: int) -> Names:
        """Of everything that lies in it, in whole or in part."""
        found = self._names[self._overlapping(start, end)]
        return found[0] if len(found) == 1 else _NONE.union(*found)

    def put(self, start: int, end: int, names: Names) -> None:
        """In place of what was there."""
        at = self._overlapping(start, end)
        if at.start == at.stop and not names:
            return
        pieces = [(start, end, names)] if names else []
        for s, e, kept in zip(self._starts[at], self._ends[at], self._names[at], strict=True):
            pieces += [(s, start, kept)] if s < start else []
            pieces += [(end, e, kept)] if e > end else []
        pieces.sort(key=lambda piece: piece[0])
        self._starts[at] = [piece[0] for piece in pieces]
        self._ends[at] = [piece[1] for piece in pieces]
        self._names[at] = [piece[2] for piece in pieces]

    def _overlapping(self, start: int, end: int) -> slice:
        return slice(bisect_right(self._ends, start), bisect_left(self._starts, end))


class Watch:
    """One load of `model`, from when it is made to `close`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.taken: set[str] = set()
        self.written: set[str] = set()  # parameters and buffers, under the model's names
        self._model = model
        self._homes: dict[int, list[tuple[int, int, str]]] = {}  # by storage: ranges, whose
        for name, tensor in state(model).items():
            if tensor.numel():
                home = (*_range(tensor), name)
                self._homes.setdefault(_storage(tensor), []).append(home)
        self._memory = Memory()
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """The loader gets it next. One without elements has nothing that could be lost."""
        if tensor.numel() == 0:
            self.taken.add(name)
            return
        with self._lock:
            self._memory.put(*_range(tensor), frozenset((name,)))

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls it, in whatever thread, and sees what it does."""
        with _Mode(self):
            return function(*args, **options)

    def close(self) -> None:
        """A parameter that now is another piece of memory counts by what lies there."""
        for name, tensor in state(self._model).items():
            if tensor.numel() and (names := self._memory.names(*_range(tensor))):
                self.taken |= names
                self.written.add(name)

    def seen(
        self, op: Any, args: Sequence[Any], options: Mapping[str, Any], result: object
    ) -> None:
        """That an operation ran; `op` is an overload."""
        effect = _effect(op)
        if not effect.fresh and not effect.writes:
            return
        inputs = list(_tensors((*args, *options.values())))
        outputs = [t for key in effect.writes for t in _tensors(_argument(key, args, options))]
        if effect.overwrites and outputs[0].is_contiguous():
            inputs = inputs[1:]  # the first is the output, of which nothing remains
        with self._lock:
            names = _NONE.union(*(self._memory.names(*_range(t)) for t in inputs if t.numel()))
            names |= self._number_read(op, names, args)
            for tensor in (*outputs, *(_tensors(result) if effect.fresh else ())):
                if tensor.numel():
                    self._arrived(tensor, names)

    def _arrived(self, tensor: torch.Tensor, names: Names) -> None:
        start, end = _range(tensor)
        homes = self._homes.get(_storage(tensor))
        if homes is None:
            self._memory.put(start, end, names)
        elif names:
            self.taken |= names
            self.written |= {name for s, e, name in homes if s < end and start < e}

    def _number_read(self, op: Any, names: Names, args: Sequence[Any]) -> Names:
        """A tensor of one element may pass as a number: `parameter.fill_(tensor.item())`."""
        pending: Names = getattr(self._of_thread, "number", _NONE)
        self._of_thread.number = names if op.name() == "aten::_local_scalar_dense" else _NONE
        return pending if op.name() == "aten::fill_.Scalar" else _NONE


def unseen() -> Any:
    """A context inside of which this thread's operations are nobody's."""
    return _disable_current_modes()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class _Mode(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        options = kwargs or {}
        result = func(*args, **options)
        self._watch.seen(func, args, options, result)
        return result


class _Effect(NamedTuple):
    writes: tuple[int | str, ...]  # arguments, by position or name
    fresh: bool  # some result is no view of an argument
    overwrites: bool  # of its first argument nothing remains, if that has no gaps


@cache
def _effect(op: Any) -> _Effect:
    schema = op._schema
    arguments = enumerate(schema.arguments)
    writes = tuple(
        argument.name if argument.kwarg_only else at
        for at, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    fresh = any(result.alias_info is None for result in schema.returns)
    return _Effect(writes, fresh, schema.name in _OVERWRITING)


def _argument(key: int | str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if isinstance(key, str):
        return options.get(key)
    return args[key] if key < len(args) else None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """From its first byte to behind its last one."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size
