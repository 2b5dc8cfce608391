"""The state of delayed scaling on emulated linears: largest entries of past steps, and the
multipliers that follow from them (``ops/fp8_emulation.py``, ``advance``).

When it moves is Transformer Engine's rule:

1. A step of inputs and weights is one forward pass of the chunk with gradients, of a microbatch;
   of output gradients one backward pass. At its end the largest entries of all ranks that hold the
   chunk are compared, tensor by tensor in the chunk's order, and the history advances. With experts
   split over ranks, the k-th expert of every rank shares one history.
2. A weight is quantised once an optimizer step: its largest entry counts once, and the multiplier
   of the first microbatch serves the rest.
3. Passes without gradients (old log-probs) use the present multipliers. What they see counts in the
   next step.
4. A recomputed forward uses the multipliers of the first one and counts nothing.
5. A tensor that saw only zeros, or no token at all, keeps its history.

Histories begin empty, with multipliers of 1.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from megarl.actor.names import unwrap
from megarl.config.fp8 import Fp8Section
from megarl.ops.fp8_emulation import advance, amax

Scales = tuple[Tensor | None, Tensor | None]  # multipliers of an input and of the weight


class DelayedScaling:
    """Of a chunk's emulated linears, ``names`` in the order of the chunk."""

    def __init__(
        self,
        names: Sequence[str],
        section: Fp8Section,
        formats: tuple[str, str],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """``formats``: of the forward and of the backward pass; ``group``: who holds the chunk."""
        n, length = len(names), section.amax_history
        self.names = list(names)
        self._section, self._formats, self._group = section, formats, group
        self._history = torch.zeros(length, 2 * n, device=device)  # input, weight, input, ...
        self._multipliers = torch.ones(2 * n, device=device)
        self._gradient_history = torch.zeros(length, n, device=device)
        self._gradient_multipliers = torch.ones(n, device=device)
        self._of_step: list[Tensor | None] = [None] * n  # the weight's, once it is quantised
        self._to_recompute: list[deque[Scales]] = [deque() for _ in names]
        self._first: int | None = None  # the linear whose backward ends the chunk's
        self._input_has_gradient = False  # then backward goes on through frozen linears

    def attach(self, chunk: Any) -> None:
        chunk.fp8_delayed = self
        chunk.decoder.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        chunk.decoder.register_forward_hook(self._end_forward)

    def new_step(self) -> None:
        """Weights are new: the next forward pass with gradients quantises them."""
        self._of_step = [None] * len(self.names)
        for waiting in self._to_recompute:  # of a step that failed midway
            waiting.clear()

    def forward(
        self, place: int, x: Tensor, weight: Tensor, *, training: bool, grad_enabled: bool
    ) -> Scales:
        """The multipliers of a linear's forward pass. One in training without gradients is the
        first of two: the second recomputes it.
        """
        waiting = self._to_recompute[place]
        if grad_enabled and waiting:
            return waiting.popleft()
        _see(self._history, 2 * place, x)
        own = self._of_step[place] if training else None
        if own is None:
            own = self._multipliers[2 * place + 1].clone()
            if training:
                _see(self._history, 2 * place + 1, weight)
                self._of_step[place] = own
        reached = self._input_has_gradient or weight.requires_grad
        if training and self._first is None and reached:
            self._first = place
        scales = self._multipliers[2 * place].clone(), own
        if training and not grad_enabled:
            waiting.append(scales)
        return scales

    def backward(self, place: int, dy: Tensor) -> Tensor:
        """The multiplier of an output gradient."""
        _see(self._gradient_history, place, dy)
        return self._gradient_multipliers[place].clone()

    def end_backward(self, place: int) -> None:
        """After a linear's backward: autograd gets last to the one that was called first."""
        if place == self._first:
            self._advance(self._gradient_history, self._gradient_multipliers, self._formats[1])

    def _begin_forward(self, decoder: Any, _: tuple[Any, ...], given: dict[str, Any]) -> None:
        entering = given["hidden_states"] if decoder.pre_process else decoder.input_tensor
        self._input_has_gradient = entering.requires_grad

    def _end_forward(self, decoder: torch.nn.Module, *_: Any) -> None:
        if decoder.training and torch.is_grad_enabled():
            self._advance(self._history, self._multipliers, self._formats[0])

    def _advance(self, history: Tensor, multipliers: Tensor, format: str) -> None:
        if self._group.size() > 1:
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=self._group)
        algo, margin = self._section.amax_algo, self._section.margin
        advance(history, multipliers, format=format, algo=algo, margin=margin)

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """(name of a linear, f32 [L + 1, 3]): histories of its input, weight and output gradient,
        and their multipliers in the last row.
        """
        for place, name in enumerate(self.names):
            own = slice(2 * place, 2 * place + 2)
            history = [self._history[:, own], self._gradient_history[:, [place]]]
            last = [self._multipliers[own], self._gradient_multipliers[[place]]]
            yield name, torch.cat([torch.cat(history, 1), torch.cat(last)[None]])

    def load(self, name: str, state: Tensor) -> None:
        place = self.names.index(name)
        own = slice(2 * place, 2 * place + 2)
        self._history[:, own], self._gradient_history[:, place] = state[:-1, :2], state[:-1, 2]
        self._multipliers[own], self._gradient_multipliers[place] = state[-1, :2], state[-1, 2]


def _see(history: Tensor, tensor: int, x: Tensor) -> None:
    history[0, tensor] = torch.maximum(history[0, tensor], amax(x.detach()))


def new_step(model: Sequence[Any]) -> None:
    for state in _states(model):
        state.new_step()


def delayed_state(model: Sequence[Any], dp_cp: dist.ProcessGroup) -> dict[str, ShardedTensor]:
    """What a checkpoint has of it, by key: every linear's, under its global name. Empty with other
    recipes. Inside ``Parallel.active``.
    """
    found = {}
    for state in _states(model):
        for name, tensor in state.saved():
            if ".local_experts." in name:
                replica = (
                    parallel_state.get_expert_tensor_parallel_rank(),
                    parallel_state.get_expert_data_parallel_rank(),
                )
            else:
                replica = parallel_state.get_tensor_model_parallel_rank(), dist.get_rank(dp_cp)
            key = f"fp8.{name}"
            found[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=(0, *replica))
    return found


def load_delayed_state(model: Sequence[Any], loaded: dict[str, Tensor]) -> None:
    for state in _states(model):
        for name in state.names:
            if f"fp8.{name}" in loaded:
                state.load(name, loaded[f"fp8.{name}"])


def _states(model: Sequence[Any]) -> Iterator[DelayedScaling]:
    for chunk in map(unwrap, model):
        state = getattr(chunk, "fp8_delayed", None)
        if state is not None:
            yield state
