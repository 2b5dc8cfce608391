"""The model's weights under Hugging Face names, gathered stage by stage: a ``WeightSource``.

Every tensor ends up whole on one of the stage's senders, those of a layer on the same one; layers
take turns among them. No rank ever holds more than one bucket and, while it is gathered, one
parameter of all expert ranks. Where files stack a layer's experts in one tensor, its sender also
holds one such tensor, until its last expert is there. Ranks outside a sender's groups take no part
in what it gathers.
"""

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

from megarl.actor.model import padded_vocab
from megarl.actor.names import global_weights, shift_expert
from megarl.actor.setup import Parallel
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec

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
        for name, weight in self._stack_by_stack():
            for full_name, shards in self._gather(name, _values(weight)):
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

    def _gather(self, name: str, shard: torch.Tensor) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """(global name, shards in tp or etp order). For an expert, one entry for each expert-
        parallel rank.
        """
        expert = self.mapping.is_expert(name)
        group = self.parallel.experts if expert else self.parallel.tp
        ranks, sender = dist.get_process_group_ranks(group), self._sender_of(name)
        if sender not in ranks:
            return
        parts = _gathered(shard.contiguous(), ranks.index(sender), group)
        if parts is None:
            return
        if not expert:
            yield name, parts
            return
        mesh, local_experts = self.parallel.mesh, self.experts // self.parallel.mesh.ep
        for ep in range(mesh.ep):
            further = (ep - self.parallel.at.ep) * local_experts
            yield shift_expert(name, further), parts[ep * mesh.etp : (ep + 1) * mesh.etp]

    def _sender_of(self, name: str) -> int:
        """What is in no layer (embeddings, the output layer) is the last one's."""
        layer = _LAYER.search(name)
        return self.senders[int(layer[1]) % len(self.senders) if layer else -1]


def _gathered(shard: torch.Tensor, to: int, group: dist.ProcessGroup) -> list[torch.Tensor] | None:
    """All ranks' shards in rank order, on rank ``to`` of the group, whose own is not copied if the
    backend lets it be; None elsewhere.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return [shard]
    if dist.get_backend(group) != "gloo":
        parts = [torch.empty_like(shard) for _ in range(size)] if rank == to else None
        dist.gather(shard, parts, group_dst=to, group=group)
        return parts
    # A gather over gloo lays all shards flat, and copies them out again.
    if rank != to:
        dist.send(shard, group_dst=to, group=group)
        return None
    parts = [shard if k == rank else torch.empty_like(shard) for k in range(size)]
    works = [
        dist.irecv(part, group_src=k, group=group) for k, part in enumerate(parts) if k != rank
    ]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
    return parts


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
