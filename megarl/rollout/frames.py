"""Messages between a collector's two processes: a JSON header and the raw bytes of arrays.

    header's length u64   payload's length u64   header   zeros to a multiple of 64   payload

Little-endian. The header is ``{"message": ..., "arrays": [[dtype, shape], ...]}``; each array lies
in the payload at the next multiple of 64. Received arrays are views of one buffer, and writable.
Nothing in a message is ever executed.
"""

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTHS = struct.Struct("<QQ")
_ALIGNMENT = 64
_MOST_BUFFERS = 512  # of one sendmsg; the system takes 1024
_ZEROS = bytes(_ALIGNMENT)
Array = NDArray[Any]


Frame = list[memoryview]  # the bytes to send, piece by piece


def make_frame(message: Any, arrays: Sequence[Array] = ()) -> Frame:
    """Raises TypeError for what is no JSON. Arrays are not copied unless they have to be."""
    described = [[a.dtype.str, a.shape] for a in arrays]
    arrays = [np.ascontiguousarray(a) for a in arrays]
    header = json.dumps({"message": message, "arrays": described}).encode()
    buffers: list[Any] = [b"", header, _ZEROS[: _padding(len(header))]]
    payload = 0
    for array in arrays:
        gap = _padding(payload)
        buffers += [_ZEROS[:gap], array.data.cast("B")] if array.size else [_ZEROS[:gap]]
        payload += gap + array.nbytes
    buffers[0] = _LENGTHS.pack(len(header), payload)
    return [memoryview(b) for b in buffers if len(b)]


def send_frame(to: socket.socket, frame: Frame) -> None:
    """Blocks until all of it is on its way. Raises OSError when the other side is gone."""
    while frame:
        sent = to.sendmsg(frame[:_MOST_BUFFERS])
        frame = list(_unsent(frame, sent))


def receive_frame(source: socket.socket) -> tuple[Any, list[Array]] | None:
    """The next message; None at the end of the stream. Raises EOFError in the middle of one."""
    lengths = _receive(source, _LENGTHS.size, may_end=True)
    if lengths is None:
        return None
    header_length, payload_length = _LENGTHS.unpack(lengths)
    rest = _receive(source, header_length + _padding(header_length) + payload_length)
    assert rest is not None
    return parse_frame(rest, header_length)


def parse_frame(rest: bytearray, header_length: int) -> tuple[Any, list[Array]]:
    """``rest``: what follows the two lengths."""
    header = json.loads(memoryview(rest)[:header_length].tobytes())
    at = header_length + _padding(header_length)
    start = at
    arrays = []
    for name, shape in header["arrays"]:
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        at += _padding(at - start)
        array = np.frombuffer(rest, dtype, count, at) if count else np.zeros(0, dtype)
        arrays.append(array.reshape(shape))
        at += count * dtype.itemsize
    return header["message"], arrays


def _padding(length: int) -> int:
    return -length % _ALIGNMENT


def _unsent(buffers: Sequence[memoryview], sent: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if sent < len(buffer):
            yield buffer[sent:] if sent else buffer
        sent = max(0, sent - len(buffer))


def _receive(source: socket.socket, length: int, *, may_end: bool = False) -> bytearray | None:
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = source.recv_into(view[got:])
        if not count:
            if may_end and not got:
                return None
            raise EOFError(f"a message ended after {got} of {length} bytes")
        got += count
    return data
