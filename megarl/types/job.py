"""A process among the others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A trainer process's place among the others; ``launch`` names this start of the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launch: str
    master_address: str  # of rank 0's node, as every rank reaches it

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size
