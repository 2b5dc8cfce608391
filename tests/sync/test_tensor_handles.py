"""Handles of tensors: what is in the pickles that SGLang's protocol wants, and what they leave."""

import base64
import os
import pickletools
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.sync.packing import Packed, Packer
from megarl.sync.stream import pieces
from megarl.sync.tensor_handles import TensorHandles
from tests.helpers.pickled import trusted

CPU = torch.device("cpu")


@dataclass
class Sink:
    """As far as handles depend on a server."""

    name: str = "server"
    ranks: int = 1
    address: str = "127.0.0.1"

    @property
    def local_address(self) -> str:
        if not self.address:
            raise OSError("no such name")
        return self.address


def packed(handles: TensorHandles) -> Packed:
    return bucket_of(handles, {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(5)})


def bucket_of(handles: TensorHandles, tensors: dict[str, torch.Tensor]) -> Packed:
    packer = Packer(2**20, CPU, allocate=handles.buffer)
    [bucket] = packer.pack(pieces([item] for item in tensors.items()))
    return bucket


def message(handles: TensorHandles, sink: Any) -> list[bytes]:
    told = handles.message(packed(handles), sink)
    return [base64.b64decode(text) for text in told["serialized_named_tensors"]]


def names_in(pickled: bytes) -> set[tuple[str, str]]:
    """What it would import, without importing anything."""
    found: set[tuple[str, str]] = set()
    strings: list[str] = []
    memo: list[Any] = []
    last: Any = None  # on the stack, where it is text
    for opcode, argument, _ in pickletools.genops(pickled):
        assert opcode.name not in ("GLOBAL", "INST", "PUT", "BINPUT"), "as older protocols have it"
        if opcode.name == "STACK_GLOBAL":
            found.add((strings[-2], strings[-1]))
        if opcode.name == "MEMOIZE":
            memo.append(last)
            continue
        last = memo[argument] if opcode.name in ("BINGET", "LONG_BINGET") else argument
        if isinstance(last, str):
            strings.append(last)
    return found


def test_they_name_functions_that_rebuild_tensors_and_nothing_else() -> None:
    """Neither a class of SGLang's, which is not installed here, nor one of ours, which is not
    there; and no descriptor, for which only child processes have the secret.
    """
    [pickled] = message(TensorHandles(CPU), Sink())
    assert names_in(pickled) == {
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "uint8"),
        ("torch", "bfloat16"),
        ("torch", "float32"),
        ("types", "SimpleNamespace"),
    }


def test_every_rank_gets_its_own_and_no_bytes_of_weights_are_in_them() -> None:
    handles = TensorHandles(CPU)
    assert len(message(handles, Sink(ranks=4))) == 4
    small = len(message(handles, Sink())[0])
    bucket = bucket_of(handles, {"a": torch.randn(100_000)})
    [text] = handles.message(bucket, Sink())["serialized_named_tensors"]  # type: ignore[arg-type]
    assert len(text) < 2 * small


@pytest.mark.parametrize("address", ["10.0.0.7", "192.168.1.3", "2001:db8::1", ""])
def test_a_server_that_is_not_on_loopback_gets_none(address: str) -> None:
    refused = TensorHandles(CPU).refuse(Sink(address=address))  # type: ignore[arg-type]
    assert ("not on loopback" in refused and address in refused) or "no such name" in refused
    for loopback in ("127.0.0.1", "127.3.2.1", "::1", "[::1]"):
        assert TensorHandles(CPU).refuse(Sink(address=loopback)) == ""  # type: ignore[arg-type]


OWNER = """
import sys, torch
from megarl.sync.tensor_handles import TensorHandles
handles = TensorHandles(torch.device("cpu"))
kept = [handles.buffer(1 << 20) for _ in range(2)]
kept[0].fill_(3)
print("ready", flush=True)
sys.stdin.readline()
"""


def shared_now() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def test_memory_that_a_killed_trainer_shared_by_name_is_removed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    its = {name for name in shared_now() if name.startswith(f"torch_{process.pid}_")}
    assert len(its) == 2
    assert all(Path("/dev/shm", name).stat().st_mode & 0o777 == 0o600 for name in its)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(100):
        if not its & shared_now():
            break
        subprocess.run(["sleep", "0.05"], check=True)
    assert not its & shared_now()


def mine() -> set[str]:
    return {name for name in shared_now() if name.startswith(f"torch_{os.getpid()}_")}


def opened(text: str) -> torch.Tensor:
    found: torch.Tensor = trusted(base64.b64decode(text))["flattened_tensor"]
    return found


def test_what_no_server_opened_is_removed_with_its_buffer() -> None:
    """A server that is lost opens nothing more. Each of these buckets is too large for a buffer,
    and has memory of its own.
    """
    handles, before = TensorHandles(CPU), mine()
    packer = Packer(2**10, CPU, allocate=handles.buffer)
    large = ([(f"w{k}", torch.ones(2**10))] for k in range(8))
    for bucket in packer.pack(pieces(large)):
        handles.message(bucket, Sink(ranks=2))  # type: ignore[arg-type]
        del bucket
        assert len(mine() - before) <= 2
    del packer
    assert mine() == before


def test_a_buffer_can_be_told_of_again_whoever_opened_it_or_not() -> None:
    """As long as there is a view of it: the buffer itself may be forgotten."""
    handles, before = TensorHandles(CPU), mine()
    bucket = bucket_of(handles, {"a": torch.full((9,), 3.0)})
    for _ in range(3):
        first, unopened = (
            handles.message(bucket, Sink(name=name))["serialized_named_tensors"]  # type: ignore[arg-type]
            for name in "ab"
        )
        seen = opened(first[0])
        assert torch.equal(seen, bucket.flat)
        del seen, unopened
    assert len(mine() - before) == 1
    del bucket, first
    assert mine() == before


READER = """
import base64, pickle, sys
seen = pickle.loads(base64.b64decode(sys.stdin.readline()))["flattened_tensor"]
print(int(seen[0]), flush=True)
sys.stdin.readline()
print(int(seen[0]), flush=True)
del seen
print("closed", flush=True)
"""


def test_a_reader_that_is_late_closes_memory_whose_name_is_gone_and_lives_on() -> None:
    handles, before = TensorHandles(CPU), mine()
    bucket = bucket_of(handles, {"a": torch.full((9,), 3, dtype=torch.uint8)})
    process = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    [text] = handles.message(bucket, Sink())["serialized_named_tensors"]  # type: ignore[arg-type]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "3\n"
    del bucket
    assert mine() == before
    assert process.communicate("\n", timeout=60)[0] == "3\nclosed\n"
    assert process.returncode == 0
