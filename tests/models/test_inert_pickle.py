"""``.metadata`` is a pickle: what is not of the types that belong in it is refused by name, and
nothing of any file is run. That each attack succeeds under ``pickle`` itself is tested first.
"""

import copyreg
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
)

from megarl.errors import DataError
from megarl.models.dist_metadata import DistMetadata, read_metadata
from tests.helpers.pickled import (
    CALLS,
    READ,
    Call,
    Refused,
    by_attributes,
    calls,
    dumped,
    of_metadata,
    text,
    trusted,
)


def test_what_torch_writes_is_read(folder: Path) -> None:
    assert read_metadata(folder) == READ


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some Pythons write members of enums: ``getattr(class, name)``."""

    def reduced(self: Any, protocol: int) -> Any:
        return getattr, (type(self), self.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)


def test_members_of_enums_are_read_however_a_python_writes_them(
    by_name: None, folder: Path
) -> None:
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder) == READ


# --- attacks --------------------------------------------------------------------------------------


def in_a_list(evil: Any) -> Metadata:
    return of_metadata(state_dict_metadata={"matrix": [[[evil]]]})


def as_a_key(evil: Any) -> Metadata:
    return of_metadata(storage_data={(1, evil): 2})


def among_chunks(evil: Any) -> Metadata:
    found = of_metadata()
    found.state_dict_metadata["matrix"].chunks.append(evil)
    return found


def as_a_dtype(evil: Any) -> Metadata:
    found = of_metadata()
    found.state_dict_metadata["matrix"].properties.dtype = evil
    return found


def in_what_is_ignored(evil: Any) -> Metadata:
    return of_metadata(planner_data={"a": ("b", evil)}, all_local_plans=[evil])


def after_the_end(evil: Any) -> Any:
    return [of_metadata(), evil]


WHERE = [in_a_list, as_a_key, among_chunks, as_a_dtype, after_the_end]


@pytest.mark.parametrize("name", CALLS)
def test_these_attacks_succeed_where_pickles_are_trusted(marker: Path, name: str) -> None:
    trusted(dumped(in_a_list(calls(marker)[name])))
    assert marker.exists()


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_anywhere_is_refused_by_its_name(
    refused: Refused, marker: Path, name: str, where: Callable[[Any], Any], protocol: int
) -> None:
    data = dumped(where(calls(marker)[name]), protocol)
    text = refused(data)
    assert f"found {name} at byte " in text
    at = int(text.partition(" at byte ")[2].partition(";")[0])
    last = name.rpartition(".")[2].encode()
    assert data[at : at + 1] == b"\x93" and last in data[:at]  # where it is looked up


def test_what_is_ignored_is_not_run_either(refused: Refused, marker: Path) -> None:
    data = dumped(in_what_is_ignored(calls(marker)["posix.system"]))
    assert "found posix.system at byte" in refused(data)


@pytest.mark.parametrize("where", [*WHERE, in_what_is_ignored])
def test_no_attribute_is_taken_of_what_is_known(
    refused: Refused, marker: Path, where: Callable[[Any], Any]
) -> None:
    """It would be by Python, which reads the file after us."""
    found = refused(dumped(where(by_attributes(marker))))
    assert "builtins.getattr is called with other arguments" in found
    trusted(dumped(in_what_is_ignored(by_attributes(marker))))
    assert marker.exists()
    marker.unlink()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_refused(refused: Refused, marker: Path, protocol: int) -> None:
    """In which classes are spelt as text, and the memo is addressed by number."""
    data = dumped(of_metadata(), protocol)
    assert "is not accepted" in refused(data)
    assert "is not accepted" in refused(dumped(Call(os.system, "true"), protocol))


SYSTEM = text("posix") + text("system") + b"\x93"
SIZE = text("torch") + text("Size") + b"\x93"
SPELT: dict[str, tuple[bytes, str]] = {  # with COMMAND in place of what is run
    "GLOBAL": (b"cposix\nsystem\n(S'COMMAND'\ntR.", "GLOBAL at byte 0"),
    "INST": (b"(S'COMMAND'\niposix\nsystem\n.", "STRING at byte 1"),
    "INST of a class": (b"(iposix\nsystem\n.", "INST at byte 1"),
    "OBJ": (b"(cposix\nsystem\nS'COMMAND'\no.", "GLOBAL at byte 1"),
    "OBJ of what is known": (b"(" + SIZE + b"o.", "OBJ at byte "),
    "REDUCE": (SYSTEM + text("COMMAND") + b"\x85R.", "posix.system at byte "),
    "STACK_GLOBAL alone": (SYSTEM + b".", "posix.system at byte "),
    "a dotted name": (text("torch") + text("Size.__subclasses__") + b"\x93)R.", "torch.Size._"),
    "from the memo": (
        b"\x8c\x06system\x94" + text("posix") + b"h\x00\x93.",
        "posix.system at byte 18",
    ),
    "EXT1": (b"\x82\x01" + text("COMMAND") + b"\x85R.", "EXT1 at byte 0"),
    "EXT2": (b"\x83\x01\x00" + text("COMMAND") + b"\x85R.", "EXT2 at byte 0"),
    "EXT4": (b"\x84\x01\x00\x00\x00" + text("COMMAND") + b"\x85R.", "EXT4 at byte 0"),
    "PERSID": (b"PCOMMAND\n.", "PERSID at byte 0"),
    "BINPERSID": (text("COMMAND") + b"Q.", "BINPERSID at byte "),
    "NEWOBJ_EX": (SIZE + b")}\x92.", "NEWOBJ_EX at byte "),
    "BYTEARRAY8": (b"\x96" + struct.pack("<Q", 2**62) + b".", "BYTEARRAY8 at byte 0"),
    "NEXT_BUFFER": (b"\x97.", "NEXT_BUFFER at byte 0"),
    "no opcode": (b"\xff.", "0xff at byte 0"),
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extension 1 is known to this process, and was used before."""
    monkeypatch.setitem(copyreg._extension_registry, ("posix", "system"), 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(copyreg._inverted_registry, 1, ("posix", "system"))  # type: ignore[attr-defined]
    monkeypatch.setitem(copyreg._extension_cache, 1, os.system)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SPELT)
def test_every_way_to_name_or_call_is_refused(
    refused: Refused, registered: None, marker: Path, name: str
) -> None:
    data, found = SPELT[name]
    command = f"touch {marker}"
    data = data.replace(text("COMMAND"), text(command)).replace(b"COMMAND", command.encode())
    assert f"found pickle opcode {found}" in (said := refused(data)) or f"found {found}" in said


@pytest.mark.parametrize("name", ["GLOBAL", "INST", "OBJ", "REDUCE", "EXT1", "EXT2", "EXT4"])
def test_these_ways_succeed_where_pickles_are_trusted(
    registered: None, marker: Path, name: str
) -> None:
    command = f"touch {marker}"
    data = SPELT[name][0].replace(text("COMMAND"), text(command))
    trusted(data.replace(b"COMMAND", command.encode()))
    assert marker.exists()


CHANGES = [  # of a class, or of an object, that the file may name
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch", "Size"),
    ("builtins", "getattr"),
    ("torch.serialization", "_get_layout"),
]


@pytest.mark.parametrize(("module", "name"), CHANGES)
def test_no_class_of_the_process_is_changed(refused: Refused, module: str, name: str) -> None:
    """By ``BUILD`` with a state for slots, which sets attributes of whatever it is given."""
    target = text(module) + text(name) + b"\x93"
    state = b"N}" + text("__init__") + target + b"s\x86"
    before = vars(Metadata).copy(), vars(TensorProperties).copy()
    refused(target + state + b"b.")
    assert before == (dict(vars(Metadata)), dict(vars(TensorProperties)))


def call(name: str, arguments: bytes) -> bytes:
    module, _, last = name.rpartition(".")
    return text(module) + text(last) + b"\x93" + arguments + b"R"


ENUM = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
ENUM_CLASS = call(ENUM, b"")[:-1]
INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
ODD: dict[str, bytes] = {
    "an attribute of a class": call("builtins.getattr", SIZE + text("count") + b"\x86"),
    "a dunder of an enum": call("builtins.getattr", ENUM_CLASS + text("__init__") + b"\x86"),
    "a method of an enum": call("builtins.getattr", ENUM_CLASS + text("mro") + b"\x86"),
    "an attribute of a member": call(
        "builtins.getattr", call(ENUM, b"K\x00\x85") + text("NAME") + b"\x86"
    ),
    "an attribute with a default": call("builtins.getattr", ENUM_CLASS + text("A") + b"N\x87"),
    "an attribute of text": call("builtins.getattr", text("a") + text("A") + b"\x86"),
    "a size of text": call("torch.Size", text("a") + b"\x85\x85"),
    "a size of a class": call("torch.Size", SIZE + b"\x85\x85"),
    "a layout of a class": call("torch.serialization._get_layout", SIZE + b"\x85"),
    "an enum of text": call(ENUM, text("a") + b"\x85"),
    "a path of a path": call("pathlib.PosixPath", call("pathlib.PosixPath", b")") + b"\x85"),
    "a call of a data class": call(INFO, text("a") + b"K\x00K\x01\x87"),
    "an unknown field": call(INFO, b")") + b"}" + text("__class__") + SIZE + b"sb",
    "a field of another": call(INFO, b")") + b"}" + text("fqn") + b"Nsb",
    "a state for slots": call(INFO, b")") + b"N}" + text("offset") + b"Ns\x86b",
    "a state of a size": call("torch.Size", b")\x85") + b"}b",
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_file_of_this_kind_never_does_is_refused(refused: Refused, name: str) -> None:
    said = refused(ODD[name] + b".")
    assert re.search(r"(with other arguments|another state) than a file of this kind has", said)


@pytest.mark.parametrize(
    "target", [b"]", b"}", b")", b"N", text("a"), text("torch") + text("int8") + b"\x93"]
)
def test_state_for_what_has_none_is_refused(refused: Refused, target: bytes) -> None:
    refused(target + b"}" + text("x") + b"K\x01sb.")


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            b"X" + struct.pack("<I", 2**32 - 1) + b"a.",
            "BINUNICODE at byte 0 ends at byte 4294967300",
        ),
        (b"\x8c\xffabc.", "SHORT_BINUNICODE at byte 0"),
        (b"\x8d" + struct.pack("<Q", 2**62) + b"a.", "opcode BINUNICODE8"),
        (b"\x8e" + struct.pack("<Q", 2**62) + b"a.", "opcode BINBYTES8"),
        (b"\x95" + struct.pack("<Q", 2**63) + b"N.", "the frame at byte 0"),
        (b"\x8b" + struct.pack("<I", 2**31 - 1) + b"N.", "opcode LONG4"),
        (b"\x8a\xff.", "LONG1 at byte 0"),
        (b"Nr" + struct.pack("<I", 2**32 - 1) + b".", "opcode LONG_BINPUT"),
        (b"Nq\xff.", "opcode BINPUT"),
        (b"Np4294967295\n.", "opcode PUT"),
        (b"g4294967295\n.", "opcode GET"),
        (b"j" + struct.pack("<I", 2**32 - 1) + b".", "damaged pickle"),
        (b"h\x05.", "damaged pickle"),
        (b"", "0 bytes without the end"),
        (b"N", "1 bytes without the end"),
        (b"N.N.", "2 bytes follow the end"),
        (b".", "damaged pickle"),
        (b"(((.", "damaged pickle"),
        (b"\x80\x09N.", "damaged pickle"),
        (b"N.", "accepted: Metadata"),
        (b"]\x94h\x00a.", "accepted: Metadata"),
        (b"}\x94" + text("a") + b"h\x00s.", "accepted: Metadata"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_damaged_pickles_are_refused(refused: Refused, data: bytes, named: str) -> None:
    """Lengths and positions that are claimed and not there, a memo of 2^32 entries, an object that
    holds itself.
    """
    assert named in refused(data)


def test_a_file_cut_short_anywhere_is_refused(refused: Refused, folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for length in [*range(0, len(data), 5), *range(len(data) - 20, len(data))]:
        refused(data[:length])


def test_a_byte_changed_anywhere_is_at_most_another_checkpoint(folder: Path, marker: Path) -> None:
    """Never another error than ours, which a loader of checkpoints would not expect."""
    data = (folder / ".metadata").read_bytes()
    outcomes = {True: 0, False: 0}
    for at in range(0, len(data), 2):
        value = data[at] ^ (1, 0x20, 0x55)[at % 3]
        (folder / ".metadata").write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        try:
            outcomes[isinstance(read_metadata(folder), DistMetadata)] += 1
        except DataError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 50, outcomes
    assert not marker.exists()
