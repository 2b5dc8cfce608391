"""``delta_apply_`` of megarl.ops, which defines it, in plain torch: for a server without megarl.

Shapes: C chunks, 16 blocks a chunk, B of them in all; E changed elements.
"""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CHUNKS = 512  # that are read at a time


@torch.no_grad()
def apply_delta(base: Tensor, payload: Tensor) -> None:
    """Does to ``base``, contiguous, what ``payload`` u8 says; both on one device. ValueError, and
    nothing is written, for a payload that is no change of such a tensor.
    """
    bits, given, item = base.view(-1).view(_BITS[base.element_size()]), len(payload), base.itemsize
    if given in (0, base.nbytes):
        bits.view(torch.uint8)[:given].copy_(payload)
        return
    chunks = -(-len(bits) // 4096)
    if not 2 * chunks <= given < base.nbytes:
        raise ValueError(f"delta: {given} bytes are no change of a tensor of {base.nbytes}")
    table = payload[: 2 * chunks].long()
    bounds = torch.cat([table.new_zeros(1), (table[::2] + 256 * table[1::2]).cumsum(0)])
    bounds += 2 * chunks
    if int(bounds[-1]) != given:
        raise ValueError(f"delta: {given} bytes, {int(bounds[-1])} by its table")
    for write in (False, True):
        for k in range(0, chunks, _CHUNKS):
            part = bits[4096 * k : 4096 * (k + _CHUNKS)]
            place, narrow, at, shift = _read(payload, bounds[k : k + _CHUNKS + 1], len(part), item)
            if write:
                width = 8 * item - 4 * item * narrow.long()
                value = sum(
                    payload[(at + j).clamp(max=given - 1)].long() << 8 * j for j in range(item)
                )
                value = (value >> shift) & ((1 << width) - 1)
                sign = (1 << width - 1) * narrow
                new = part[place].long() * narrow + (value ^ sign) - sign
                part[place] = new.to(part.dtype)  # the lower bits


def _read(payload: Tensor, bounds: Tensor, numel: int, item: int) -> tuple[Tensor, ...]:
    """[E]: changed elements, whether by a step, and from which byte and bit on the payload says so.
    Reads whatever there is before it knows whether it adds up.
    """

    def read(at: Tensor) -> Tensor:
        return payload[at.clamp(0, len(payload) - 1)].long()

    i256 = torch.arange(256, device=payload.device)
    start, length = bounds[:-1, None], bounds.diff()[:, None]
    before = 256 * torch.arange(16 * len(start), device=payload.device).view(-1, 16)
    size = (numel - before).clamp(0, 256)
    blocks = (size > 0).sum(-1, keepdim=True)
    code = read(start + i256[:16]) * ((size > 0) & (length > 0))
    kind, there = code & 127, i256 < size.view(-1, 1)  # [C, 16], [B, 256]
    places = torch.where(kind < 32, kind, (size + 7) // 8 * (kind == 32))
    at = start + blocks + places.cumsum(-1) - places
    held = (read(at[..., None] + i256[:32]) * (i256[:32] < places[..., None])).view(-1, 32)
    kind = kind.view(-1)
    listed = (i256[:32] < kind[:, None]) & (kind < 32)[:, None]
    mapped, every = (kind == 32).nonzero()[:, 0], (kind == 33).nonzero()[:, 0]
    marks = ((held[mapped][..., None] >> i256[:8]) & 1 > 0).flatten(1)
    marks, marked = torch.cat([marks, there[every]]), torch.cat([mapped, every])
    count = (kind * (kind < 32)).index_copy(0, marked, marks.sum(-1)).view_as(code)
    values = torch.where(code >= 128, (count * item + 1) // 2, count * item)
    wrong = [kind > 33, code == 128, marks & ~there[marked], listed & (held >= size.view(-1, 1))]
    wrong += [(held.diff(dim=-1) <= 0) & listed[:, 1:]]
    total = (blocks + (places + values).sum(-1, keepdim=True)) * (length > 0)
    if any(bool(w.any()) for w in wrong) or not torch.equal(total, length):
        raise ValueError("delta: its chunks do not add up")
    (row, rank), (dense, element) = listed.nonzero().T, marks.nonzero().T
    block = torch.cat([row, marked[dense]])
    rank = torch.cat([rank, (marks.cumsum(-1) - 1)[marks]])
    narrow = (code >= 128).view(-1)[block]
    bit = rank * (8 * item - 4 * item * narrow.long())
    begin = start + blocks + places.sum(-1, keepdim=True) + values.cumsum(-1) - values
    place = before.view(-1)[block] + torch.cat([held[listed], element])
    return place, narrow, begin.view(-1)[block] + bit // 8, bit % 8
