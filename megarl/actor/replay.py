"""Routing replay: tokens go to the experts that were chosen for them elsewhere.

Only the *choice* is replayed. Gate weights are the live logits' at the chosen experts, by the
model's own rule, so a router has its gradient. ``moe.routing_replay`` says whose choices:

    old_logprobs (R2)   of the pass before the update, which records them; training replays
                        (Zheng et al. 2025, arXiv:2507.18071)
    rollout (R3)        of the rollout server; old log-probs and training both replay
                        (Ma et al. 2025, arXiv:2510.11370)

A reference policy and a critic are other models and choose for themselves. Where nobody's choice is
known (a sample's last token was never routed by a server, and neither was padding), and only there,
the router's own is taken.

1. A schedule's choices are one ``RoutedPass``; rows go by their number in the schedule. No queue: a
   row's choices are found by its number whatever the order of forward and backward passes.
2. A forward pass says which row it is of (``forward``). Recomputation runs inside a backward pass,
   which does not; a hook on the gradient of the chunk's output does, before anything of that row
   is recomputed.
3. A layer takes the choices of a row exactly once in its forward pass, and exactly once more if
   that ran without gradients though it trains, which is what recomputation looks like. Anything
   else raises, with the numbers of layer and microbatch.
4. Where a token's choices are the router's own, they are in the router's order: sums over them have
   the same bits, and replaying a pass's own choices changes none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.actor.names import unwrap
from megarl.actor.setup import Parallel
from megarl.errors import DataError, RunError
from megarl.models.spec import ModelSpec
from megarl.ops.routing_codec import find_bad_id
from megarl.types import Mean, Metric, PackedBatch, StepMetrics

# the router's own ids i64 [T, K] -> (ids i64 [T, K], which tokens' are replayed bool [T])
Take = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
Model = Sequence[torch.nn.Module]  # a stage's chunks


class TopK:
    """What a router asks for its experts, in the place of upstream's ``RouterReplay``."""

    def __init__(self) -> None:
        self.layer_number: int | None = None  # upstream sets it
        self.take: Take | None = None  # while a RoutedPass runs
        self.replayed: torch.Tensor | None = None  # bool [T] of the latest call

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores [T, K] of the chosen experts, their ids i64 [T, K]); ``scores`` [T, E] are what
        top-k is taken of, an expert bias included.
        """
        values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.take is None:
            self.replayed = None
            return values, ids
        ids, self.replayed = self.take(ids)
        return scores.gather(1, ids), ids


@dataclass(frozen=True)
class Choices:
    """Of one row's tokens that are on this rank, in their order: ``ids`` u8 | u16 [T, M of the
    stage, K] and ``known`` bool [T], on the host.
    """

    ids: torch.Tensor
    known: torch.Tensor


@dataclass
class _Row:
    """One row on one chunk, on the device."""

    number: int
    ids: torch.Tensor | None  # [layers of the chunk, T, K]; None: they are recorded
    known: torch.Tensor | None  # bool [T]
    counted: torch.Tensor | None  # bool [T], known and no padding
    first: set[int]  # layers whose forward pass is to come
    again: set[int] = field(default_factory=set)  # layers that are to be recomputed
    found: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, what was recorded


class RoutedPass:
    """The choices of one schedule, for the time that the context is entered. ``choices``: of a row,
    given the positions of it that are here; None: the routers' own are recorded as the rows'
    ``old_routing``. ``training``: a backward pass follows every forward pass.
    """

    def __init__(
        self,
        model: Model,
        rows: Sequence[PackedBatch],
        parallel: Parallel,
        choices: "Callable[[int, PackedBatch, torch.Tensor], Choices] | None",
        *,
        training: bool,
    ) -> None:
        self._model, self._rows, self._parallel = list(model), rows, parallel
        self._choices, self._training = choices, training
        self._layers = [list(_moe_layers(chunk)) for chunk in model]
        self._open: dict[tuple[int, int], _Row] = {}  # by chunk and number
        self._forward: _Row | None = None
        self._backward: list[_Row | None] = [None] * len(self._model)
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}
        self._changed: list[torch.Tensor] = []
        self._counted = 0

    def __enter__(self) -> "RoutedPass":
        for k, layers in enumerate(self._layers):
            for j, layer in enumerate(layers):
                layer.router.router_replay.take = partial(self._take, k, j)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for layer in (layer for layers in self._layers for layer in layers):
            layer.router.router_replay.take = None
        if error is None:
            self._refuse_leftovers()
            self._keep_recorded()

    def forward(
        self,
        core: torch.nn.Module,
        number: int,
        index: torch.Tensor,
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """``compute()``, the forward pass of chunk ``core`` for row ``number``, of which the
        positions ``index`` are here.
        """
        k = next(k for k, chunk in enumerate(self._model) if chunk is core)
        row = self._begin(k, number, index)
        self._forward = row
        output = compute()
        self._forward = None
        if row.first:
            raise self._wrong(k, row, row.first, "were not asked for in the forward pass")
        if row.again:
            output.register_hook(partial(self._begin_backward, k, row))
        if not row.again:
            self._close(k, row)
        return output

    def metrics(self) -> StepMetrics:
        """``moe/replay_changed``: the share of true tokens and layers where the router would have
        chosen other experts. Every rank has tokens or layers of its own.
        """
        if not self._counted:
            return []
        changed = float(torch.stack(self._changed).sum())
        return [Metric("moe/replay_changed", Mean(changed, self._counted))]

    def _begin(self, k: int, number: int, index: torch.Tensor) -> _Row:
        row, layers = self._rows[number], set(range(len(self._layers[k])))
        if (k, number) in self._open:
            raise RunError(f"routing replay: microbatch {number} runs a second time in chunk {k}")
        if self._choices is None or not layers:
            started = _Row(number, None, None, None, layers)
        else:
            where = _on_this_rank(index, self._parallel)
            choices, device = self._choices(number, row, where), self._parallel.device
            start = sum(map(len, self._layers[:k]))
            ids = choices.ids[:, start : start + len(layers)].transpose(0, 1).contiguous()
            counted = choices.known & row.valid[where]
            self._counted += int(counted.sum()) * len(layers) if self._training else 0
            started = _Row(
                *(number, ids.to(device), choices.known.to(device), counted.to(device), layers)
            )
        self._open[k, number] = started
        return started

    def _begin_backward(self, k: int, row: _Row, gradient: torch.Tensor) -> None:
        self._backward[k] = row

    def _take(self, k: int, j: int, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Layer ``j`` of chunk ``k`` chooses."""
        row = self._forward
        if row is not None:
            if j not in row.first:
                raise self._wrong(k, row, {j}, "were asked for twice in one forward pass")
            row.first.remove(j)
            if self._training and not torch.is_grad_enabled():
                row.again.add(j)
        else:
            row = self._backward[k]
            if row is None or j not in row.again:
                raise self._wrong(k, row, {j}, "were asked for outside of the row's passes")
            row.again.remove(j)
            if not row.again:
                self._close(k, row)
        if row.ids is None:
            row.found[j] = live
            return live, None
        return self._replay(row, j, live, counts=row is self._forward and self._training)

    def _replay(
        self, row: _Row, j: int, live: torch.Tensor, *, counts: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert row.ids is not None and row.known is not None and row.counted is not None
        assert row.ids[j].shape == live.shape, (row.ids.shape, live.shape)
        wanted = row.ids[j].long()
        other = (wanted.sort(dim=1).values != live.sort(dim=1).values).any(1) & row.known
        if counts:
            self._changed.append((other & row.counted).sum())
        return torch.where(other[:, None], wanted, live), row.known

    def _close(self, k: int, row: _Row) -> None:
        """Nothing of the row is used any more on chunk ``k``."""
        if self._choices is None and (found := [row.found[j] for j in sorted(row.found)]):
            kind = torch.uint8 if self._layers[k][0].router.num_experts <= 256 else torch.uint16
            self._recorded[k, row.number] = torch.stack(found, 1).to(kind)
        del self._open[k, row.number]

    def _keep_recorded(self) -> None:
        """On the host, when all is done: nothing waits for the device in between."""
        if self._choices is not None:
            return
        for number, row in enumerate(self._rows):
            found = (self._recorded.get((k, number)) for k in range(len(self._model)))
            parts = [part.cpu() for part in found if part is not None]
            row.old_routing = torch.cat(parts, 1) if parts else None

    def _refuse_leftovers(self) -> None:
        for (k, _), row in self._open.items():
            raise self._wrong(k, row, row.again, "are left over: nothing was recomputed")

    def _wrong(self, k: int, row: _Row | None, layers: set[int], what: str) -> RunError:
        numbers = [self._layers[k][j].layer_number - 1 for j in sorted(layers)]
        which = "no microbatch" if row is None else f"microbatch {row.number}"
        return RunError(f"routing replay: choices of layers {numbers} for {which} {what}")


# --- whose choices --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoutingReplay:
    """A policy's ``moe.routing_replay``: where its two kinds of pass have a row's choices from."""

    spec: ModelSpec
    parallel: Parallel
    old: "Source"
    training: "Source"

    @staticmethod
    def of(kind: str, spec: ModelSpec, parallel: Parallel) -> "RoutingReplay | None":
        """None where routers choose for themselves."""
        return RoutingReplay(spec, parallel, *_SOURCES[kind]) if kind in _SOURCES else None

    def old_pass(self, model: Model, rows: Sequence[PackedBatch]) -> RoutedPass:
        return self._pass(model, rows, self.old, training=False)

    def training_pass(self, model: Model, rows: Sequence[PackedBatch]) -> RoutedPass:
        return self._pass(model, rows, self.training, training=True)

    def _pass(
        self, model: Model, rows: Sequence[PackedBatch], source: "Source", *, training: bool
    ) -> RoutedPass:
        layers = sum(len(list(_moe_layers(chunk))) for chunk in model)
        shape = (layers, self.spec.topk, self.spec.experts)
        choices = None if source is None else partial(source, shape=shape)
        return RoutedPass(model, rows, self.parallel, choices, training=training)


def of_rollout(
    number: int, row: PackedBatch, where: torch.Tensor, *, shape: tuple[int, int, int]
) -> Choices:
    """The server's, of MoE layers of the stage, experts a token and experts ``shape``. Raises
    DataError for what is no choice of these routers.
    """
    layers, topk, experts = shape
    if row.routing is None or row.routed is None:
        found = "no routing, which moe.routing_replay=rollout replays"
        raise DataError(f"microbatch {number}: {found}; accepted: of every sample")
    accepted = (len(row.tokens), layers, topk)
    if tuple(row.routing.shape) != accepted:
        raise DataError(
            f"microbatch {number}: routing of (tokens, MoE layers, experts a token) "
            f"{tuple(row.routing.shape)}; accepted: {accepted}"
        )
    known = row.routing[row.routed].numpy()
    at = find_bad_id(known, experts)
    if at >= 0:
        token, rest = divmod(at, layers * topk)
        position = int(row.routed.nonzero()[token])
        raise DataError(
            f"microbatch {number}: position {position}, MoE layer {rest // topk} of the stage: "
            f"experts {known[token, rest // topk].tolist()}; accepted: {topk} different ones from "
            f"0 to {experts - 1}"
        )
    return Choices(row.routing[where], row.routed[where])


def of_old_pass(
    number: int, row: PackedBatch, where: torch.Tensor, *, shape: tuple[int, int, int]
) -> Choices:
    """Those that the pass before the update recorded on this rank, padding's as well."""
    expected = (len(where), *shape[:2])
    assert row.old_routing is not None and row.old_routing.shape == expected, (number, expected)
    return Choices(row.old_routing, torch.ones(len(where), dtype=torch.bool))


Source = Callable[..., Choices] | None  # None: the routers' own are recorded
_SOURCES: dict[str, tuple[Source, Source]] = {  # before the update, and in training
    "old_logprobs": (None, of_old_pass),
    "rollout": (of_rollout, of_rollout),
}


def _on_this_rank(index: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Of a context-parallel share of a row, what the routers here see: sequence parallelism cuts it
    into consecutive parts.
    """
    return index.chunk(parallel.mesh.tp)[parallel.at.tp]


def _moe_layers(chunk: torch.nn.Module) -> Iterator[Any]:
    """In order of their layers; those of multi-token prediction compute nothing and are not among
    them.
    """
    yield from (m for m in unwrap(chunk).decoder.modules() if isinstance(m, MoELayer))
