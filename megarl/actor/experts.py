"""One expert's second matrix: upstream's, where experts have biases."""

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear


class ExpertOutput(RowParallelLinear):
    """Of experts that are computed one by one (``layers.py``).

    1. One rank's sum over its tensor-parallel group is the tensor itself, returned by a function of
       autograd's as a view. Upstream's MLP adds the bias to it in place, which autograd forbids: no
       sum is asked for.
    2. Upstream marks the bias for a sum of its gradient over the tensor-parallel ranks, as if they
       held the same expert and parts of the sequence. They hold different experts, or copies whose
       gradients data parallelism sums already.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True  # whoever dispatches the tokens also sums
        if self.bias is not None:
            self.bias.sequence_parallel = False
