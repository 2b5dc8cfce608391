"""What workers do in ``test_bounds.py``: a real actor's weights go to a carrier that keeps account
of them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.actor.names import global_weights
from megarl.models.fp8_export import fp8_export
from megarl.models.mapping import mapping_for
from megarl.models.served import ServedForm
from megarl.sync.carrier import Outcome
from megarl.sync.packing import Packed, Packer
from megarl.sync.push import singly
from megarl.sync.sending import Form, send_all
from megarl.sync.stream import pieces
from tests.actor.work import config_for, make_actor
from tests.sync.allocated import Allocated


@dataclass
class Ledger:
    """What ``send_all`` asks of a ``Carrier``; to nowhere."""

    sizes: dict[str, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=list)

    def send(self, bucket: Packed, names: set[str]) -> Outcome:
        self.buckets.append(bucket.flat.numel())
        for spec in bucket.specs:
            assert spec.name not in self.sizes
            size = getattr(torch, spec.dtype).itemsize
            for extent in spec.shape:
                size *= extent
            self.sizes[spec.name] = size
        return Outcome()


def send(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    senders: int,
    max_bytes: int,
    hoard: bool = False,
    fp8: bool = False,
) -> dict[str, Any]:
    """``sizes``: bytes that this rank sent, by name; ``buckets``: of each; ``peak``: allocated
    meanwhile; ``expert`` and ``other``: of the largest parameter of an expert, and of anything
    else, that it holds. ``hoard``: everything is gathered before it is sent; ``fp8``: in blocks, as
    far as the model's weights can be.
    """
    actor = make_actor(config_for(hf), layout)
    try:
        source, ledger = actor.weights(senders), Ledger()
        packer = Packer(max_bytes, torch.device("cpu"))
        form: Form = singly
        if fp8:
            mapping = mapping_for(actor.spec)
            form = ServedForm.of(mapping, "bfloat16", fp8_export(mapping, "f32")).groups
        with Allocated() as allocated:
            tensors = source.tensors()
            if hoard:
                tensors = iter(list(tensors))
            sent = send_all(tensors, form, pieces, packer, ledger, {"server"})
        assert sent.error is None and sent.num_bytes == sum(ledger.buckets)
        held = [
            (".experts." in n, w.nbytes) for n, w in global_weights(actor.model, actor.parallel)
        ]
        return {
            "sizes": ledger.sizes,
            "buckets": ledger.buckets,
            "peak": allocated.peak,
            "expert": max(size for expert, size in held if expert),
            "other": max(size for expert, size in held if not expert),
        }
    finally:
        parallel_state.destroy_model_parallel()
