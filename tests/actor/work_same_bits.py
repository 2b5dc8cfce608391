"""Worker side of test_same_bits.py."""

from pathlib import Path
from typing import Any

from megarl.actor.attention_packed import PackedAttention
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare


def attention_calls(rank: int, hf: Path, samples: list[Sample], sections: dict[str, Any]) -> int:
    """How often a training pass computes attention."""
    from megatron.core import parallel_state

    config = config_for(hf, algo={"minibatches": 1}, **sections)
    actor = make_actor(config, {})
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    try:
        plan = prepare(actor, config, samples)
        for chunk in actor.model:
            for module in chunk.modules():
                if isinstance(module, PackedAttention):
                    module.register_forward_hook(counted)
        actor.forward_backward(plan.steps[0])
        return count
    finally:
        parallel_state.destroy_model_parallel()
