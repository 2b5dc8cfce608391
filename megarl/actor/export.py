"""The model's weights under Hugging Face names, gathered stage by stage: a ``WeightSource``.

Every tensor ends up whole on one of the stage's senders:

1. Those of a layer on the same one; layers take turns among the senders.
2. But experts go no further than they must: where a layer's expert group has several senders, each
   has the experts of the expert-parallel ranks from its own to the next sender's. If every one of
   them sends, none is gathered. Where files stack a layer's experts in one tensor, rule 1 holds.
3. No rank ever holds more than one bucket, one parameter of all expert ranks, and what is on its
   way meanwhile: of the next parameters `_AHEAD_BYTES`, or the largest. With a stack, its sender
   also holds one such tensor, until its last expert is there.
4. Ranks outside a sender's groups take no part in what it gathers.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        for group in (self.parallel.experts, self.parallel.tp):
            _meet(group)
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
        order), of an expert one entry for each expert-parallel rank that the sender has to send.
        Collective.
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
        if to := self._senders_of(name, dist.get_process_group_ranks(group)):
            yield _gather(name, shard.contiguous(), to, group)

    def _by_name(
        self, name: str, parts: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """As ``gathered``; ``parts`` by rank in the group."""
        if not self.mapping.is_expert(name):
            if parts:
                yield name, list(parts.values())
            return
        mesh, local_experts = self.parallel.mesh, self.experts // self.parallel.mesh.ep
        for ep in sorted({rank // mesh.etp for rank in parts}):
            further = (ep - self.parallel.at.ep) * local_experts
            shards = [parts[ep * mesh.etp + etp] for etp in range(mesh.etp)]
            yield shift_expert(name, further), shards

    def _group_of(self, name: str) -> dist.ProcessGroup:
        return self.parallel.experts if self.mapping.is_expert(name) else self.parallel.tp

    def _senders_of(self, name: str, ranks: Sequence[int]) -> list[int]:
        """For each of the ``ranks`` of its group, the place among them of who sends what it has of
        a parameter. None where its layer is sent by another group.
        """
        layer = _LAYER.search(name)  # what is in no layer is the last one's: embeddings, the head
        turn = int(layer[1]) if layer else -1
        sender = self.senders[turn % len(self.senders)]
        if sender not in ranks:
            return []
        if not self.mapping.is_expert(name) or self.mapping.slice_of(name) is not None:
            return [ranks.index(sender)] * len(ranks)
        senders = [ranks.index(sender) for sender in self.senders if sender in ranks]
        return self.parallel.mesh.expert_senders(senders, turn)


@dataclass
class _Gather:
    """Of one parameter, under way. ``parts``: what this rank has to send of it, by rank in the
    group, in order.
    """

    name: str
    parts: dict[int, torch.Tensor]
    works: list[dist.Work]
    num_bytes: int  # that this rank gets or gives, or what it has

    def wait(self) -> dict[int, torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.parts


def _gather(name: str, shard: torch.Tensor, to: Sequence[int], group: dist.ProcessGroup) -> _Gather:
    """Begins to send what each rank of the group has to its rank in ``to``. One's own shard is not
    copied. (A collective gather over gloo lays all shards flat, and copies them out again.)
    """
    rank = dist.get_rank(group)
    mine = [r for r, sender in enumerate(to) if sender == rank]
    parts = {r: shard if r == rank else torch.empty_like(shard) for r in mine}
    others = [(r, part) for r, part in parts.items() if r != rank]
    exchange = [dist.P2POp(dist.irecv, part, group=group, group_peer=r) for r, part in others]
    if to[rank] != rank:
        exchange.append(dist.P2POp(dist.isend, shard, group=group, group_peer=to[rank]))
    works = dist.batch_isend_irecv(exchange) if exchange else []
    return _Gather(name, parts, works, shard.nbytes * max(len(exchange), 1))


def _meet(group: dist.ProcessGroup) -> None:
    """NCCL has a part of a group exchange something only after something of all of it."""
    if dist.get_world_size(group) > 1 and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def _ahead(
    gathers: Iterable[_Gather], num_bytes: int
) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
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
