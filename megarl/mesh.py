"""The layout of the trainer ranks: one owner of every parallel degree.

=====  =====================================================================================
axis   what it splits
=====  =====================================================================================
tp     every weight matrix by rows or columns; with tp > 1 activations between them by
       sequence ("sequence parallel")
pp     the layers, into consecutive stages, equal ones unless ``first_layers`` or ``last_layers``
       says what the first or the last holds: the embedding and the output head weigh too
vpp    the layers of a stage, into equal chunks ("virtual stages"): layers go through chunk 0 of
       every stage, then through chunk 1 of every stage; takes no ranks of its own
cp     the tokens of every sequence: of 2 * cp chunks, rank r holds chunks r and 2 * cp - 1 - r
dp     the batch
ep     the experts of a layer; taken out of the tp * cp * dp ranks of a stage
etp    one expert's matrices, as tp does for the others
=====  =====================================================================================

Rank order is Megatron's ("tp-cp-ep-dp-pp"): tp varies fastest, pp slowest. Inside a stage of
tp * cp * dp ranks the expert grid is etp fastest, then ep, then the expert data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism. Divisibility is checked in ``config/validate.py``."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    align: int = 1  # what the number of a rank's tokens must divide by, beside the axes (FP8)

    @property
    def stage_size(self) -> int:
        """Ranks that hold one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1

    @property
    def segment_multiple(self) -> int:
        """A sequence's padded length must divide by it: context parallelism cuts it into 2 * cp
        chunks.
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def row_multiple(self) -> int:
        """A row's padded length must divide by it: sequence parallelism cuts each cp share into tp
        parts, each a multiple of ``align``. Samples are padded to ``segment_multiple`` alone: what
        is added is padding at the row's end.
        """
        return lcm(self.segment_multiple * self.tp, self.cp * self.tp * self.align)

    @property
    def rows_multiple(self) -> int:
        """A rank's rows of an optimizer step must divide by it: with more than one chunk a stage,
        rows go through a chunk in groups of pp before the stage turns to its next chunk.
        """
        return self.pp if self.vpp > 1 else 1

    def stage_layers(self, layers: int) -> list[int]:
        """How many of a model's ``layers`` each stage holds, its chunks together [pp].

        Raises ValueError, with what divides wrong, for a number that does not fit.
        """
        if self.pp == 1:
            counts = [layers]
        else:
            ends = {0: self.first_layers, self.pp - 1: self.last_layers}
            given = {stage: n for stage, n in ends.items() if n is not None}
            left, stages = layers - sum(given.values()), self.pp - len(given)
            if left < stages or (left % stages if stages else left):
                raise ValueError(f"{left} layers are left for {stages} equal stages")
            counts = [given.get(stage, left // max(stages, 1)) for stage in range(self.pp)]
        if any(n % self.vpp for n in counts):
            raise ValueError(f"stages of {counts} layers cannot be cut into vpp {self.vpp} chunks")
        return counts

    def layers_of(self, layers: int, stage: int, chunk: int = 0) -> range:
        """The layers that chunk ``chunk`` of stage ``stage`` holds."""
        sizes = [n // self.vpp for n in self.stage_layers(layers)]
        start = chunk * sum(sizes) + sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def coordinates(self, rank: int) -> Coordinates:
        stage, inner = divmod(rank, self.stage_size)
        return Coordinates(
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=stage,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
        )

    def senders(self, stage: int, count: int) -> list[int]:
        """The ranks that send stage ``stage``'s weights to the rollout servers: as far apart as
        they can be, so that they have links of their own.
        """
        first, size = stage * self.stage_size, self.stage_size
        assert 1 <= count <= size, (count, size)
        return [first + k * size // count for k in range(count)]

    def expert_senders(self, senders: Sequence[int], turn: int) -> list[int]:
        """For each rank of an expert group, [etp * ep] with etp fastest, who sends its experts to
        the rollout servers: of the group's ``senders`` the last one that is not behind it. ``turn``
        goes round among those with the same experts.
        """
        with_experts: dict[int, list[int]] = {}
        for sender in sorted(senders):
            with_experts.setdefault(sender // self.etp, []).append(sender)
        found, present = [], min(with_experts)
        for ep in range(self.ep):
            present = ep if ep in with_experts else present
            of = with_experts[present]
            found += [of[turn % len(of)]] * self.etp
        return found
