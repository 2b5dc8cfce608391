"""The model's weights under Hugging Face names, gathered stage by stage: a ``WeightSource``.

Every tensor ends up whole on one of the stage's senders, those of a layer on the same one; layers
take turns among them. No rank ever holds more than one bucket, one parameter of all expert ranks,
and what is on its way meanwhile: of the next parameters `_AHEAD_BYTES`, or the largest. Where files
stack a layer's experts in one tensor, its sender also holds one such tensor, until its last expert
is there. Ranks outside a sender's groups take no part in what it gathers.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

from megarl.actor.model import padded_vocab
from megarl.actor.names import global_weights, shift_expert
from megarl.actor.setup import Parallel
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec

_AHEAD_BYTES = 2**24  # small parameters would each wait for a round trip between ranks
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class MegatronWeights:
    """Implements ``protocols.WeightSource`` for the stage of this rank; tensors keep the
    weights' dtype.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        spec: ModelSpec,
        parallel: Parallel,
        senders: int = 1,
    ) -> None:
        """``senders`` of every stage."""
        self.model, self.parallel = model, parallel
        self.mapping = mapping_for(spec, padded_vocab(spec))
        self.experts = spec.experts
        self.senders = parallel.mesh.senders(parallel.at.pp, senders)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) on its sender, nothing elsewhere. Collective over the senders'
        groups.
        """
        stack = _Stack(self.experts)
        for name, parts in _ahead(self._gathers(), _AHEAD_BYTES):
            for full_name, shards in self._by_name(name, parts):
                index = self.mapping.slice_of(full_name)
                for hf, tensor in self.mapping.to_hf(full_name, shards):
                    if index is None:
                        yield hf, tensor
                    else:
                        yield from stack.put(hf, index, tensor)

    def _stack_by_stack(self) -> list[tuple[str, torch.Tensor]]:
        """All weights; those that end up in one HF tensor one after another."""
        weights = list(global_weights(self.model, self.parallel))
        first: dict[str, int] = {}
        places = [
            i if self.mapping.slice_of(name) is None else first.setdefault(hf, i)
            for i, (name, _) in enumerate(weights)
            for hf in self.mapping.hf_names(name)[:1]
        ]
        order = sorted(range(len(weights)), key=places.__getitem__)
        return [weights[i] for i in order]

    def gathered(self, name: str, shard: torch.Tensor) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Whatever this rank has of a parameter, on its sender: (global name, shards in tp or etp
        order), of an expert one entry for each expert-parallel rank. Collective.
        """
        for gather in self._gathering(name, shard):
            yield from self._by_name(name, gather.wait())

    def _gathers(self) -> Iterator["_Gather"]:
        """Begun, of every parameter that this rank has a part in."""
        for name, weight in self._stack_by_stack():
            yield from self._gathering(name, _values(weight))

    def _gathering(self, name: str, shard: torch.Tensor) -> Iterator["_Gather"]:
        """Nothing where this rank has no part in it."""
        group = self._group_of(name)
        ranks, sender = dist.get_process_group_ranks(group), self._sender_of(name)
        if sender in ranks:
            yield _gather(name, shard.contiguous(), ranks.index(sender), group)

    def _by_name(
        self, name: str, parts: list[torch.Tensor] | None
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """As ``gathered``."""
        if parts is None:
            return
        if not self.mapping.is_expert(name):
            yield name, parts
            return
        mesh, local_experts = self.parallel.mesh, self.experts // self.parallel.mesh.ep
        for ep in range(mesh.ep):
            further = (ep - self.parallel.at.ep) * local_experts
            yield shift_expert(name, further), parts[ep * mesh.etp : (ep + 1) * mesh.etp]

    def _group_of(self, name: str) -> dist.ProcessGroup:
        return self.parallel.experts if self.mapping.is_expert(name) else self.parallel.tp

    def _sender_of(self, name: str) -> int:
        """What is in no layer (embeddings, the output layer) is the last one's."""
        layer = _LAYER.search(name)
        return self.senders[int(layer[1]) % len(self.senders) if layer else -1]


@dataclass
class _Gather:
    """Of one parameter, under way. ``parts``: all ranks' shards in rank order, on the sender."""

    name: str
    parts: list[torch.Tensor] | None
    works: list[dist.Work]
    num_bytes: int  # that this rank gets or gives

    def wait(self) -> list[torch.Tensor] | None:
        for work in self.works:
            work.wait()
        return self.parts


def _gather(name: str, shard: torch.Tensor, to: int, group: dist.ProcessGroup) -> _Gather:
    """Begins to gather on rank ``to`` of the group; its own shard is not copied if the backend lets
    it be.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return _Gather(name, [shard], [], shard.nbytes)
    if dist.get_backend(group) != "gloo":
        parts = [torch.empty_like(shard) for _ in range(size)] if rank == to else None
        dist.gather(shard, parts, group_dst=to, group=group)
        return _Gather(name, parts, [], shard.nbytes * size)
    # A gather over gloo lays all shards flat, and copies them out again.
    if rank != to:
        return _Gather(
            name, None, [_begun(dist.isend(shard, group=group, group_dst=to))], shard.nbytes
        )
    parts = [shard if k == rank else torch.empty_like(shard) for k in range(size)]
    others = [(k, part) for k, part in enumerate(parts) if k != rank]
    works = [_begun(dist.irecv(part, group=group, group_src=k)) for k, part in others]
    return _Gather(name, parts, works, shard.nbytes * len(others))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _ahead(
    gathers: Iterable[_Gather], num_bytes: int
) -> Iterator[tuple[str, list[torch.Tensor] | None]]:
    """(name, parts) in order, each when it is there; those behind it have begun, of up to
    ``num_bytes`` together, and no more than the largest so far.
    """
    under_way: deque[_Gather] = deque()
    size = largest = 0
    for gather in gathers:
        under_way.append(gather)
        size, largest = size + gather.num_bytes, max(largest, gather.num_bytes)
        while size > min(num_bytes, largest):
            first = under_way.popleft()
            size -= first.num_bytes
            yield first.name, first.wait()
    for gather in under_way:
        yield gather.name, gather.wait()


def _values(weight: torch.Tensor) -> torch.Tensor:
    """In the model's dtype. Of a parameter that is kept in FP8, what its codes stand for."""
    if is_float8tensor(weight):
        values: torch.Tensor = dequantize_fp8_tensor(weight)
        return values.detach()
    return weight.detach()


class _Stack:
    """Entries of one HF tensor after another; each tensor comes out with its last entry."""

    def __init__(self, size: int) -> None:
        self.size, self.name, self.missing = size, "", 0
        self.tensor: torch.Tensor | None = None

    def put(self, name: str, index: int, entry: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self.tensor is None:
            self.name, self.missing = name, self.size
            self.tensor = entry.new_empty(self.size, *entry.shape)
        assert name == self.name, (name, self.name, self.missing)
        self.tensor[index] = entry
        self.missing -= 1
        if not self.missing:
            whole, self.tensor = self.tensor, None
            yield name, whole
