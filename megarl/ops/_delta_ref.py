"""The references of ``megarl.ops.delta``, which defines what they do: plain torch integers, on any
device. A payload's chunks are read and written all at once, some at a time.

Shapes: C chunks, 16 blocks a chunk, 256 elements a block; E elements. Bytes of a block that is not
there are 0, and so are its elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.ops._arguments import check_device, check_dim, check_type

ENCODE, APPLY = "delta_encode_", "delta_apply_"
BLOCK, BLOCKS = 256, 16
CHUNK = BLOCK * BLOCKS
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_BITMAP, _ALL, _NARROW = 32, 33, 128
_FAULTS = (
    "nothing wrong",
    "a code that is none",
    "another length than its codes say",
    "places that are out of order, or beyond the block",
)
_BAD_CODE, _BAD_LENGTH, _BAD_PLACE = 1, 2, 3
_CHUNKS_AT_A_TIME = 256  # numbers are i64: some 100 MB on the way


def delta_encode_ref_(base: Tensor, new: Tensor) -> Tensor:
    """The specification of ``delta_encode_``, in plain torch integers on any device."""
    check_encode(base, new)
    new = new.contiguous()
    item = base.element_size()
    sizes, chunks = [], []
    for at, end in _parts(base.numel()):
        old_E, new_E = (_patterns(x.reshape(-1)[at:end]) for x in (base, new))
        size_C, bytes_ = _encode_chunks(old_E, new_E, item)
        sizes.append(size_C)
        chunks.append(bytes_)
    base.copy_(new)
    if not any(bytes_.numel() for bytes_ in chunks):
        return new.new_empty(0, dtype=torch.uint8)
    table = torch.stack([torch.cat(sizes) & 255, torch.cat(sizes) >> 8], -1).reshape(-1)
    payload = torch.cat([table.byte(), *chunks])
    whole = new.reshape(-1).view(torch.uint8)
    return payload if payload.numel() < whole.numel() else whole.clone()


def delta_apply_ref_(base: Tensor, payload: Tensor) -> None:
    """The specification of ``delta_apply_``, in plain torch integers on any device."""
    check_apply(base, payload)
    if payload.numel() == 0:
        return
    if payload.numel() == base.nbytes:
        base.view(-1).view(torch.uint8).copy_(payload)
        return
    bounds = _bounds(base, payload)
    for at, end in _parts(base.numel()):
        _read_chunks(payload, bounds, at, end, base.element_size())
    bits = base.view(-1).view(BITS[base.element_size()])
    for at, end in _parts(base.numel()):
        found = _read_chunks(payload, bounds, at, end, base.element_size())
        element_E = found.marks.view(-1).nonzero()[:, 0] + at
        old_E = _patterns(bits[element_E])
        new_E = torch.where(found.narrow_E, old_E + found.value_E, found.value_E)
        bits[element_E] = _as_signed(new_E, base.element_size()).to(bits.dtype)


def _parts(numel: int) -> Iterator[tuple[int, int]]:
    step = _CHUNKS_AT_A_TIME * CHUNK
    return ((at, min(at + step, numel)) for at in range(0, numel, step))


def _patterns(x: Tensor) -> Tensor:
    """i64 in [0, 2^bits)."""
    return x.view(BITS[x.element_size()]).long() & _mask(x.element_size())


def _mask(item: int) -> int:
    return (1 << 8 * item) - 1


def _as_signed(x: Tensor, item: int) -> Tensor:
    """What i64 of those bits are in ``BITS``."""
    sign = 0 if item == 1 else 1 << (8 * item - 1)
    return ((x & _mask(item)) ^ sign) - sign


def _in_blocks(x: Tensor) -> Tensor:
    """[E] -> [C, 16, 256]."""
    return torch.nn.functional.pad(x, (0, -x.numel() % CHUNK)).view(-1, BLOCKS, BLOCK)


def _sizes(numel: int, device: torch.device) -> Tensor:
    """How many elements each block has: i64 [C, 16]."""
    chunks = -(-numel // CHUNK)
    before = torch.arange(chunks * BLOCKS, device=device).view(-1, BLOCKS) * BLOCK
    return (numel - before).clamp(0, BLOCK)


def _place_bytes(code: Tensor, size: Tensor) -> Tensor:
    kind = code & 127
    bitmap = torch.where(kind == _BITMAP, (size + 7) // 8, 0)
    return torch.where(kind < _BITMAP, kind, bitmap)


def _value_bytes(code: Tensor, count: Tensor, item: int) -> Tensor:
    return torch.where(code >= _NARROW, (count * item + 1) // 2, count * item)


def _before(x: Tensor) -> Tensor:
    """Sums of what comes before in the last dimension."""
    return x.cumsum(-1) - x


def _encode_chunks(old_E: Tensor, new_E: Tensor, item: int) -> tuple[Tensor, Tensor]:
    """How many bytes each chunk has i64 [C], and all of them u8."""
    new = _in_blocks(new_E)
    step = (new - _in_blocks(old_E)) & _mask(item)
    marks, size = step != 0, _sizes(old_E.numel(), old_E.device)
    count = marks.sum(-1)
    half = 1 << 4 * item
    narrow = (((step + half // 2) & _mask(item)) < half).all(-1) & (count > 0)
    kind = torch.where(count < (size + 7) // 8, count, _BITMAP)
    kind = torch.where(count == size, _ALL, kind)
    code = torch.where(count > 0, kind + _NARROW * narrow, 0)

    places, values = _place_bytes(code, size), _value_bytes(code, count, item)
    blocks_C = (size > 0).sum(-1)
    size_C = blocks_C + places.sum(-1) + values.sum(-1)
    size_C = torch.where(count.sum(-1) > 0, size_C, 0)
    start = _before(size_C)[:, None]
    places_at = start + blocks_C[:, None] + _before(places)
    values_at = start + blocks_C[:, None] + places.sum(-1, keepdim=True) + _before(values)

    out = old_E.new_zeros(int(size_C.sum()))
    there = (size > 0) & (size_C > 0)[:, None]
    out[(start + torch.arange(BLOCKS, device=out.device))[there]] = code[there]
    rank = marks.cumsum(-1) - 1
    listed = marks & (kind < _BITMAP)[..., None]
    out[(places_at[..., None] + rank)[listed]] = listed.nonzero()[:, -1]
    byte = torch.arange(BLOCK // 8, device=out.device)
    mapped = (code & 127 == _BITMAP)[..., None] & (byte < places[..., None])
    bitmap = (marks.view(*size.shape, -1, 8) << torch.arange(8, device=out.device)).sum(-1)
    out[(places_at[..., None] + byte)[mapped]] = bitmap[mapped]
    for shift in range(0, 8 * item, 4):  # half a byte of every value at a time
        nibble = (torch.where(narrow[..., None], step, new) >> shift) & 15
        half_byte = rank * item * torch.where(narrow, 1, 2)[..., None] + shift // 4
        here = marks & (~narrow[..., None] | (shift < 4 * item))
        at = (values_at[..., None] + half_byte // 2)[here]
        out.index_add_(0, at, nibble[here] << 4 * (half_byte[here] % 2))
    return size_C, out.byte()


@dataclass(frozen=True)
class _Found:
    """Of some chunks: which elements changed, bool [C, 16, 256]; of these, in order, E of them,
    whether they are given by a step, and that step or the new bit pattern.
    """

    marks: Tensor
    narrow_E: Tensor
    value_E: Tensor


def _bounds(base: Tensor, payload: Tensor) -> Tensor:
    """Where each chunk begins, and the end of the last: i64 [C + 1]."""
    chunks = -(-base.numel() // CHUNK)
    table = payload[: 2 * chunks].long().view(-1, 2)
    lengths = table[:, 0] + 256 * table[:, 1]
    found, left = int(lengths.sum()), payload.numel() - 2 * chunks
    if found != left:
        raise RuntimeError(
            f"{APPLY}: payload has {left} bytes behind its table, which says {found}"
        )
    ends = lengths.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]) + 2 * chunks


@dataclass(frozen=True)
class _Reader:
    """Reads chunks' bytes, of those without a fault. ``start``, ``length``, ``fault``: i64 [C]."""

    payload: Tensor
    start: Tensor
    length: Tensor
    fault: Tensor

    def refuse(self, wrong: Tensor, what: int) -> None:
        """``wrong`` bool [C]; the first thing that is wrong with a chunk counts."""
        new = (self.fault == 0) & wrong & (self.length > 0)
        self.fault.masked_fill_(new, what)

    def read(self, at: Tensor, here: Tensor) -> Tensor:
        """i64, 0 but ``here``."""
        sound = ((self.fault == 0) & (self.length > 0)).view(-1, *[1] * (here.dim() - 1)) & here
        return torch.where(sound, self.payload[torch.where(sound, at, 0)].long(), 0)


def _read_chunks(payload: Tensor, bounds: Tensor, at: int, end: int, item: int) -> _Found:
    """Those of elements ``at`` to ``end``. Raises RuntimeError for the first that has a fault."""
    first, size = at // CHUNK, _sizes(end - at, payload.device)
    start, stop = bounds[first : first + len(size)], bounds[first + 1 : first + 1 + len(size)]
    reader = _Reader(payload, start, stop - start, torch.zeros_like(start))
    blocks = (size > 0).sum(-1)
    reader.refuse(reader.length < blocks, _BAD_LENGTH)
    code = reader.read(start[:, None] + torch.arange(BLOCKS, device=start.device), size > 0)
    kind = code & 127
    reader.refuse(((kind > _ALL) | (code == _NARROW)).any(-1), _BAD_CODE)
    places = _place_bytes(code, size)
    rest = reader.length - blocks - places.sum(-1)
    reader.refuse(rest < 0, _BAD_LENGTH)
    marks = _read_places(reader, start + blocks, code, size)
    values = _value_bytes(code, marks.sum(-1), item)
    reader.refuse(rest != values.sum(-1), _BAD_LENGTH)
    if bool(reader.fault.any()):
        which = int(reader.fault.nonzero()[0])
        what = _FAULTS[int(reader.fault[which])]
        raise RuntimeError(f"{APPLY}: chunk {first + which} of the payload has {what}")
    values_at = start[:, None] + blocks[:, None] + places.sum(-1, keepdim=True) + _before(values)
    return _read_values(payload, values_at, code, marks, item)


def _read_places(reader: _Reader, start: Tensor, code: Tensor, size: Tensor) -> Tensor:
    """Marks, bool [C, 16, 256]."""
    kind, places = code & 127, _place_bytes(code, size)
    byte = torch.arange(BLOCK // 8, device=start.device)
    here = byte < places[..., None]
    held = reader.read((start[:, None] + _before(places))[..., None] + byte, here)
    bits = (held[..., None] >> torch.arange(8, device=start.device)) & 1
    marks = (bits > 0).flatten(-2) & (kind == _BITMAP)[..., None]
    there = torch.arange(BLOCK, device=start.device) < size[..., None]
    marks |= (kind == _ALL)[..., None] & there
    listed = here & (kind < _BITMAP)[..., None]
    chunk, block, _ = listed.nonzero(as_tuple=True)
    marks[chunk, block, held[listed]] = True
    disorder = (held.diff(dim=-1) <= 0) & listed[..., 1:]
    reader.refuse((disorder.any(-1) | (marks & ~there).any(-1)).any(-1), _BAD_PLACE)
    return marks


def _read_values(
    payload: Tensor, values_at: Tensor, code: Tensor, marks: Tensor, item: int
) -> _Found:
    narrow = (code >= _NARROW)[..., None].expand_as(marks)[marks]
    rank = (marks.cumsum(-1) - 1)[marks]
    half_byte = rank * item * torch.where(narrow, 1, 2)
    start = values_at[..., None].expand_as(marks)[marks]
    value = torch.zeros_like(rank)
    for shift in range(0, 8 * item, 4):
        at = half_byte + shift // 4
        here = ~narrow | (shift < 4 * item)
        byte = payload[torch.where(here, start + at // 2, 0)].long()
        value |= torch.where(here, (byte >> 4 * (at % 2)) & 15, 0) << shift
    sign = 1 << (4 * item - 1)
    return _Found(marks, narrow, torch.where(narrow, (value ^ sign) - sign, value))


# --- arguments ------------------------------------------------------------------------------------


def check_base(op: str, base: Tensor) -> None:
    if base.element_size() not in BITS:
        raise RuntimeError(f"{op}: elements must be of 1, 2 or 4 bytes, got {base.element_size()}")
    if not base.is_contiguous():
        raise RuntimeError(f"{op}: base must be contiguous")


def check_encode(base: Tensor, new: Tensor) -> None:
    check_base(ENCODE, base)
    for what, found, wanted in (
        ("dtype", new.dtype, base.dtype),
        ("shape", list(new.shape), list(base.shape)),
    ):
        if found != wanted:
            raise RuntimeError(f"{ENCODE}: new must have base's {what}, {wanted}, got {found}")
    check_device(ENCODE, "new", new, base)


def check_apply(base: Tensor, payload: Tensor) -> None:
    check_base(APPLY, base)
    check_dim(APPLY, "payload", payload, 1)
    check_type(APPLY, "payload", payload, torch.uint8)
    check_device(APPLY, "payload", payload, base)
    given, table = payload.numel(), 2 * -(-base.numel() // CHUNK)
    if given > base.nbytes:
        raise RuntimeError(
            f"{APPLY}: payload must have at most the {base.nbytes} bytes of the tensor, got {given}"
        )
    if given not in (0, base.nbytes) and given < table:
        raise RuntimeError(
            f"{APPLY}: payload must have at least the {table} bytes of its table, got {given}"
        )
