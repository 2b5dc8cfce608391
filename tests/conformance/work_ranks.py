"""What ranks do in tests of ``megarl.conformance.ranks``."""

import os
from typing import Any

import torch
import torch.distributed as dist


def work(job: dict[str, Any], group: dist.ProcessGroup) -> float:
    """The sum of 1 and 2 over two ranks, unless rank 1 does something else."""
    if group.rank() == 1 and job["do"] == "raise":
        raise ValueError("on purpose")
    if group.rank() == 1 and job["do"] == "die":
        os._exit(3)
    value = torch.tensor(group.rank() + 1.0)
    dist.all_reduce(value, group=group)
    return float(value)
