"""A pickle as inert records: what it would have built, with nothing of it run.

Only for pickles of data whose types are known beforehand, such as a distributed checkpoint's
``.metadata``.

1. Opcodes are scanned first. Only those are accepted that Python's pickler writes at protocols 4
   and 5 for plain objects; no position, length or frame may reach beyond the end. What addresses
   the memo by number, extension registries, persistent ids and classes by text is not among them.
2. A global is looked up in nothing but the caller's table, by module and name exactly. Found is a
   class of records made for this one reading, never the class meant: the arguments of a call or of
   ``__new__``, and the state, are kept in the record. So no pickle can call code, or change a class
   of the process.
3. The caller says of every global which arguments and which state it may get (``Form``). A file
   that is accepted therefore does nothing else under Python's own unpickler, either: what a call
   returns is never called, has no attribute taken, and no class is given state.
4. Values that ``constants`` has are given as they are; they must be immutable.

A file made to take long or much memory to read is not recognised as such.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megarl.errors import DataError

Name = tuple[str, str]  # (module, name) of a global

_FIXED = {  # opcode -> bytes that follow
    **{"PROTO": 1, "MARK": 0, "STOP": 0, "NONE": 0, "NEWTRUE": 0, "NEWFALSE": 0},
    **{"BININT": 4, "BININT1": 1, "BININT2": 2, "BINGET": 1, "LONG_BINGET": 4, "MEMOIZE": 0},
    **{"EMPTY_LIST": 0, "EMPTY_DICT": 0, "EMPTY_TUPLE": 0, "APPEND": 0, "APPENDS": 0},
    **{"SETITEM": 0, "SETITEMS": 0, "TUPLE": 0, "TUPLE1": 0, "TUPLE2": 0, "TUPLE3": 0},
    **{"STACK_GLOBAL": 0, "NEWOBJ": 0, "REDUCE": 0, "BUILD": 0, "FRAME": 8},
}
_COUNTED = {"SHORT_BINUNICODE": 1, "BINUNICODE": 4, "LONG1": 1}  # -> bytes of the length
_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}
_NAMES = {code: name for name, code in _CODES.items()}
_FIXED_AT = [-1] * 256
_COUNTED_AT = [0] * 256
for _name, _size in _FIXED.items():
    _FIXED_AT[_CODES[_name]] = _size
for _name, _size in _COUNTED.items():
    _COUNTED_AT[_CODES[_name]] = _size
_STOP, _GLOBAL, _FRAME = _CODES["STOP"], _CODES["STACK_GLOBAL"], _CODES["FRAME"]


@dataclass(frozen=True)
class Form:
    """Which arguments a global may be called with, and which state the result be given."""

    arguments: Callable[[tuple[Any, ...]], bool]
    state: Callable[[Any], bool]


class Record:
    """An object of the class ``kind``, or what calling it gives: ``args`` it was called with,
    ``state`` that it was given.
    """

    kind: ClassVar[Name]
    form: ClassVar[Form]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Record":
        if not cls.form.arguments(args):
            raise _UnexpectedError(f"{'.'.join(cls.kind)} is called with other arguments")
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        if not self.form.state(state):
            raise _UnexpectedError(f"{'.'.join(self.kind)} is given another state")
        self.state = state


class _UnexpectedError(Exception):
    """What is not of its ``Form``."""


def load_inert(
    data: bytes, path: Path, *, records: Mapping[Name, Form], constants: Mapping[Name, Any]
) -> Any:
    """The pickle ``data`` of file ``path``: containers, numbers, strings, ``constants`` and
    ``Record`` of the kinds in ``records``.

    Raises DataError, naming what was found and at which byte, for every opcode and global that is
    not accepted, for arguments and states that are not of a global's form, and where the pickle is
    damaged.
    """
    globals_at = _scan(data, path)
    reader = _Reader(data, path, globals_at, records, constants)
    try:
        return reader.load()
    except DataError:
        raise
    except _UnexpectedError as e:
        raise DataError(f"{path}: {e} than a file of this kind has: nothing of it was run") from e
    except Exception as e:  # a damaged pickle fails in any way that a method of these types can
        raise DataError(f"{path} is a damaged pickle: {type(e).__name__}: {e}") from e


def _scan(data: bytes, path: Path) -> list[int]:
    """Where globals are looked up: bytes from the start. Only ``STOP`` ends a pickle."""
    at, size = 0, len(data)
    globals_at: list[int] = []
    while at < size:
        code = data[at]
        follow, counted = _FIXED_AT[code], _COUNTED_AT[code]
        if follow >= 0:
            end = at + 1 + follow
        elif counted:
            begin = at + 1 + counted
            end = begin + int.from_bytes(data[at + 1 : begin], "little")
        else:
            found = _NAMES.get(code, f"{code:#04x}")
            raise DataError(f"{path}: found pickle opcode {found} at byte {at}; it is not accepted")
        if end > size:
            raise DataError(f"{path} is truncated: {_NAMES[code]} at byte {at} ends at byte {end}")
        if code == _STOP:
            if end != size:
                raise DataError(f"{path}: {size - end} bytes follow the end of the pickle")
            return globals_at
        if code == _GLOBAL:
            globals_at.append(at)
        elif code == _FRAME and end + int.from_bytes(data[at + 1 : end], "little") > size:
            raise DataError(f"{path} is truncated: the frame at byte {at} ends beyond it")
        at = end
    raise DataError(f"{path} is truncated: {size} bytes without the end of the pickle")


class _Reader(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        path: Path,
        globals_at: list[int],
        records: Mapping[Name, Form],
        constants: Mapping[Name, Any],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._globals_at, self._count = path, globals_at, 0
        self._known: dict[Name, Any] = {
            **{
                name: type(name[1], (Record,), {"kind": name, "form": form})
                for name, form in records.items()
            },
            **constants,
        }

    def find_class(self, module: str, name: str) -> Any:
        at, self._count = self._globals_at[self._count], self._count + 1
        if (module, name) not in self._known:
            raise DataError(
                f"{self._path}: found {module}.{name} at byte {at}; a file of this kind has none: "
                "nothing of it was run"
            )
        return self._known[module, name]
