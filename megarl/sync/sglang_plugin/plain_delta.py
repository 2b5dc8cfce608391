"""``delta_apply_`` of megarl.ops, which defines it, in plain torch: for a server without megarl."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def apply_delta(base: Tensor, payload: Tensor) -> None:
    """Does to ``base``, contiguous, what ``payload`` u8 says; both on one device. ValueError, and
    nothing is written, for a payload that is no change of such a tensor.
    """
    bits, given = base.view(-1).view(_BITS[base.element_size()]), payload.numel()
    if given in (0, base.nbytes):
        bits.view(torch.uint8)[:given].copy_(payload)
        return
    chunks = -(-bits.numel() // 4096)
    if not 2 * chunks <= given < base.nbytes:
        raise ValueError(f"delta: {given} bytes are no change of a tensor of {base.nbytes}")
    table = payload[: 2 * chunks].long()
    bounds = (
        torch.cat([table.new_zeros(1), (table[::2] + 256 * table[1::2]).cumsum(0)]) + 2 * chunks
    )
    if int(bounds[-1]) != given:
        raise ValueError(f"delta: {given} bytes, {int(bounds[-1])} by its table")
    for write in (False, True):
        for k in range(0, chunks, 256):
            part = bits[4096 * k : 4096 * (k + 256)]
            new = _changed(part, payload, bounds[k : k + 257])
            if write:
                part.copy_(new)


def _changed(old: Tensor, payload: Tensor, bounds: Tensor) -> Tensor:
    """Some chunks, changed. Reads whatever there is before it knows whether it adds up."""
    item, i = old.element_size(), torch.arange(256, device=old.device)
    start, length = bounds[:-1, None], bounds.diff()[:, None]
    size = (len(old) - torch.arange(16 * len(start), device=i.device) * 256).clamp(0, 256)
    size = size.view(-1, 16)  # of the blocks, 16 a chunk
    read = lambda at: payload[at.clamp(0, len(payload) - 1)].long()  # noqa: E731
    blocks = (size > 0).sum(-1, keepdim=True)
    code = read(start + i[:16]) * ((size > 0) & (length > 0))
    kind, there, narrow = code & 127, i < size[..., None], (code >= 128)[..., None]
    places = torch.where(kind < 32, kind, (size + 7) // 8 * (kind == 32))
    here = i[:32] < places[..., None]
    held = read((start + blocks + places.cumsum(-1) - places)[..., None] + i[:32]) * here
    listed = here & (kind < 32)[..., None]
    marks = ((held[..., None] >> i[:8]) & 1 > 0).flatten(-2) & (kind == 32)[..., None]
    marks |= there & (kind == 33)[..., None]
    marks[(*listed.nonzero().T[:2], held[listed])] = True
    count = marks.sum(-1)
    values = torch.where(code >= 128, (count * item + 1) // 2, count * item)
    wrong = (kind > 33) | (code == 128) | (marks & ~there).any(-1)
    wrong |= ((held.diff(dim=-1) <= 0) & listed[..., 1:]).any(-1)
    total = (blocks + (places + values).sum(-1, keepdim=True)) * (length > 0)
    if bool(wrong.any()) or not torch.equal(total, length):
        raise ValueError("delta: its chunks do not add up")
    begin = start + blocks + places.sum(-1, keepdim=True) + values.cumsum(-1) - values
    half_byte = (marks.cumsum(-1) - 1) * item * (2 - narrow.long())
    value = torch.zeros_like(half_byte)
    for shift in range(0, 8 * item, 4):
        k = half_byte + shift // 4
        nibble = (read(begin[..., None] + k // 2) >> 4 * (k % 2)) & 15
        value = value + torch.where(narrow & (shift >= 4 * item), 0, nibble << shift)
    sign = 1 << 4 * item - 1
    value = torch.where(narrow, (value ^ sign) - sign, value).view(-1)[: len(old)]
    before = old.long() * narrow.expand_as(marks).reshape(-1)[: len(old)]
    new = (before + value) & (1 << 8 * item) - 1
    sign = 0 if item == 1 else 1 << 8 * item - 1
    return torch.where(marks.view(-1)[: len(old)], ((new ^ sign) - sign).to(old.dtype), old)
