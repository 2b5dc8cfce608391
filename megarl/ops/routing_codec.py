"""Experts that tokens were routed to: ids in one or two bytes, and as bytes to send or to keep.

L routed tokens, M layers with experts, K experts a token, E experts in a layer.

    narrow   [L, M, K] of any integers -> u8 where E <= 256, else u16
    encode   -> bytes                   decode   bytes -> what was encoded

A message is a header of 32 bytes, little-endian, and one payload:

    magic "mgRT"  version u8  method u8  bytes an id u8  0  E u32  L u32  M u16  K u16
    payload bytes u64  CRC-32 of payload u32

method 0   every id in ceil(log2 E) bits, the lowest first, in the order [L, M, K]
method 1   the lower, then the upper bytes of all ids in the order [M, L, K], Huffman-coded by zlib

1. Method 1 is for files (``deflate``), and only where it is the smaller. With 128 experts it takes
   80% of one byte an id where popularity is skewed, 69% where strongly so, against the 87.5% of
   method 0, which is several times faster (tools/opsbench/routing_codec.py). zlib's search for
   repeats finds nothing here and is off.
2. An id outside 0..E-1, or twice in one token's K, is no routing: an error with position and value,
   on the way in and out.
3. What ``decode`` is given may be damaged or hostile. It reads and allocates nothing before the
   header's numbers agree with the length there is, and raises CodecError.
"""

import base64
import binascii
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.ops._native import host_function

Ids = NDArray[Any]  # of u8 or u16 once narrow

VERSION = 1
MAX_EXPERTS = 65536
_HEADER = struct.Struct("<4sBBBBIIHHQI")
_MAGIC = b"mgRT"
_BITS, _DEFLATE = 0, 1
_ZLIB_MOST = 1032  # bytes that one byte of zlib's can become


class CodecError(ValueError):
    """Ids that are no routing, or bytes that are no message."""


def narrow(ids: Ids, experts: int) -> Ids:
    """The ids in the narrowest type for ``experts``. Raises CodecError for what is no routing."""
    _check_shape(ids.shape, experts)
    if ids.dtype.kind not in "iu":
        raise CodecError(f"routing must be of integers, got {ids.dtype}")
    _check_ids(ids, experts)
    return np.ascontiguousarray(ids, _dtype(experts))


def from_base64(text: bytes | memoryview) -> Ids:
    """i32 [numbers] of base64 of little-endian int32, as servers send routing. Raises CodecError
    for what is not that: other characters, line breaks, padding anywhere but at the end.
    """
    run = host_function("routing_codec", "ids_from_base64")
    ids: Ids | None
    try:
        ids = from_base64_ref(text) if run is None else run(text)
    except (binascii.Error, ValueError):
        ids = None
    if ids is None:
        raise CodecError(f"{len(text)} characters, {bytes(text[:40])!r}..., are no base64 of int32")
    return ids


def from_base64_ref(text: bytes | memoryview) -> Ids:
    raw = base64.b64decode(text, validate=True)
    return np.frombuffer(raw, "<i4") if raw else np.zeros(0, np.int32)


def encode(ids: Ids, experts: int | None = None, *, deflate: bool = False) -> bytes:
    """``experts``: E; by default the least that the ids and their type allow. Raises CodecError."""
    if experts is None:
        least = 257 if ids.dtype == np.uint16 else 1
        experts = max(least, int(ids.max(initial=0)) + 1)
    ids = narrow(ids, experts)
    method, payload = _BITS, pack_ids(ids, _bits(experts))
    if deflate and len(smaller := _deflate(ids)) < len(payload):
        method, payload = _DEFLATE, smaller
    return _header(ids, experts, method, payload) + payload


def decode(message: bytes) -> tuple[Ids, int]:
    """(ids [L, M, K] as they were encoded, E). Raises CodecError for anything else."""
    shape, experts, method, payload = _parse(message)
    if method == _BITS:
        ids = unpack_ids(payload, _bits(experts), shape, _dtype(experts))
    else:
        ids = _inflate(payload, shape, _dtype(experts))
    _check_ids(ids, experts)
    return ids, experts


# --- with a compiled part each --------------------------------------------------------------------


def pack_ids(ids: Ids, bits: int) -> bytes:
    """The payload of method 0."""
    run = host_function("routing_codec", "pack_ids")
    if run is None:
        return pack_ids_ref(ids, bits)
    packed: bytes = run(ids, bits)
    return packed


def pack_ids_ref(ids: Ids, bits: int) -> bytes:
    spread = (ids.reshape(-1, 1) >> np.arange(bits, dtype=ids.dtype)) & 1
    return np.packbits(spread.astype(np.uint8), bitorder="little").tobytes()


def unpack_ids(packed: bytes, bits: int, shape: tuple[int, ...], dtype: Any) -> Ids:
    """The inverse of ``pack_ids``, for as many bytes as it gives."""
    run = host_function("routing_codec", "unpack_ids")
    if run is None:
        return unpack_ids_ref(packed, bits, shape, dtype)
    ids = np.empty(shape, dtype)
    run(packed, bits, ids)
    return ids


def unpack_ids_ref(packed: bytes, bits: int, shape: tuple[int, ...], dtype: Any) -> Ids:
    count = int(np.prod(shape))
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=count * bits, bitorder="little")
    weights = 1 << np.arange(bits, dtype=np.int64)
    return (flat.reshape(count, bits) @ weights).astype(dtype).reshape(shape)


def find_bad_id(ids: Ids, experts: int) -> int:
    """The first entry, counted through, that is outside 0..E-1 or that an earlier one of its token
    equals; -1 where there is none.
    """
    run = host_function("routing_codec", "find_bad_id")
    if run is None or ids.dtype not in (np.uint8, np.uint16, np.int32):
        return find_bad_id_ref(ids, experts)
    found: int = run(np.ascontiguousarray(ids), max(ids.shape[-1], 1), experts)
    return found


def find_bad_id_ref(ids: Ids, experts: int) -> int:
    bad = (ids < 0) | (ids >= experts)
    for k in range(1, ids.shape[-1]):
        bad[..., k] |= (ids[..., :k] == ids[..., k, None]).any(-1)
    return int(bad.argmax()) if bad.any() else -1


# --- the parts of a message -----------------------------------------------------------------------


def _header(ids: Ids, experts: int, method: int, payload: bytes) -> bytes:
    kind = (VERSION, method, ids.dtype.itemsize, 0)
    return _HEADER.pack(_MAGIC, *kind, experts, *ids.shape, len(payload), zlib.crc32(payload))


def _parse(message: bytes) -> tuple[tuple[int, int, int], int, int, bytes]:
    """(shape, E, method, payload), all of which agree."""
    if len(message) < _HEADER.size:
        raise CodecError(f"{len(message)} bytes; a header alone has {_HEADER.size}")
    magic, version, method, size, zero, experts, *numbers = _HEADER.unpack_from(message)
    shape, length, crc = (numbers[0], numbers[1], numbers[2]), numbers[3], numbers[4]
    if magic != _MAGIC:
        raise CodecError(f"begins with {magic!r}; accepted: {_MAGIC!r}")
    if version != VERSION:
        raise CodecError(f"version {version}; accepted: {VERSION}")
    if method not in (_BITS, _DEFLATE) or zero:
        raise CodecError(f"method {method}, {zero}; accepted: {_BITS} or {_DEFLATE}, 0")
    _check_shape(shape, experts)
    if size != _dtype(experts).itemsize:
        raise CodecError(f"{size} bytes an id of {experts} experts")
    payload = message[_HEADER.size :]
    if len(payload) != length:
        raise CodecError(f"a payload of {len(payload)} bytes; its header says {length}")
    count = shape[0] * shape[1] * shape[2]
    needed = -(-count * _bits(experts) // 8)
    if method == _BITS and length != needed:
        raise CodecError(
            f"{length} bytes for {shape} ids of {experts} experts, which take {needed}"
        )
    if method == _DEFLATE and count * size > length * _ZLIB_MOST:
        raise CodecError(f"{length} bytes cannot become the {count * size} of {shape} ids")
    if zlib.crc32(payload) != crc:
        raise CodecError("the payload is damaged: its CRC-32 is not the header's")
    return shape, experts, method, payload


def _deflate(ids: Ids) -> bytes:
    planes = np.ascontiguousarray(ids.transpose(1, 0, 2)).astype(ids.dtype.newbyteorder("<"))
    bytes_of = planes.reshape(-1, 1).view(np.uint8)  # [ids, bytes an id]
    coder = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(np.ascontiguousarray(bytes_of.T).tobytes()) + coder.flush()


def _inflate(payload: bytes, shape: tuple[int, int, int], dtype: Any) -> Ids:
    count = shape[0] * shape[1] * shape[2]
    wanted = count * dtype.itemsize
    coder = zlib.decompressobj()
    try:
        raw = coder.decompress(payload, wanted + 1)  # never more, whatever is in there
    except zlib.error as e:
        raise CodecError(f"the payload does not inflate: {e}") from e
    if len(raw) != wanted or not coder.eof or coder.unused_data:
        raise CodecError(f"a payload that is not exactly the {wanted} bytes of {shape} ids")
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, count)
    ids = np.ascontiguousarray(planes.T).view(dtype.newbyteorder("<")).astype(dtype)
    return np.ascontiguousarray(ids.reshape(shape[1], shape[0], shape[2]).transpose(1, 0, 2))


def _check_shape(shape: tuple[int, ...], experts: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise CodecError(f"{experts} experts; accepted: 1 to {MAX_EXPERTS}")
    if len(shape) != 3:
        raise CodecError(f"routing must have the shape [tokens, layers, experts], got {shape}")
    for n, most in zip(shape, (2**32 - 1, 2**16 - 1, 2**16 - 1), strict=True):
        if n > most:
            raise CodecError(f"routing of the shape {shape} is too large")


def _check_ids(ids: Ids, experts: int) -> None:
    at = find_bad_id(ids, experts)
    if at < 0:
        return
    token, layer, k = (int(i) for i in np.unravel_index(at, ids.shape))
    value = int(ids[token, layer, k])
    why = "a second time" if 0 <= value < experts else f"of {experts}"
    raise CodecError(
        f"token {token}, layer {layer}, choice {k}: expert {value} {why}; "
        f"accepted: different ones from 0 to {experts - 1}"
    )


def _bits(experts: int) -> int:
    return max(1, (experts - 1).bit_length())  # never 0: a message would then cost nothing an id


def _dtype(experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)
