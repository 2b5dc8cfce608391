"""Which implementation of every op a run uses: said at its start, counted at its end."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RunError
from megarl.hostcomm import gather_and_share, gather_json
from megarl.ops import HOST_OPS, KERNELS, backends, call_counts

log = logging.getLogger(__name__)


def agreed_backends(device: torch.device, group: dist.ProcessGroup) -> dict[str, str]:
    """Op -> "native" or "torch", the same on every rank. Collective.

    RunError where ranks differ, as when one node was not built: numbers would differ in their last
    bits, and collectives in their order.
    """
    mine = backends([*KERNELS, *HOST_OPS], device)
    for rank, theirs in enumerate(gather_and_share(mine, group)):
        unlike = sorted(op for op in mine if theirs.get(op) != mine[op])
        if unlike:
            raise RunError(
                f"rank {rank} runs {_named(theirs, unlike)}, another rank {_named(mine, unlike)}; "
                "build megarl alike on every node (pip install --no-deps -e .), or set "
                "MEGARL_OPS=native to find the one that is not, MEGARL_OPS=torch to do without"
            )
    return mine


def describe(chosen: dict[str, str], device: torch.device) -> str:
    """One line: which ops are native."""
    native = sorted(op for op, kind in chosen.items() if kind == "native")
    torch_ones = sorted(set(chosen) - set(native))
    parts = [f"native: {', '.join(native)}"] if native else []
    parts += [f"torch: {', '.join(torch_ones)}"] if torch_ones else []
    return f"ops on {device.type}: " + "; ".join(parts)


def all_calls(group: dist.ProcessGroup) -> dict[str, dict[str, int]] | None:
    """Op -> {"native" or "torch": calls}, of all ranks together; None but on rank 0. Collective."""
    gathered = gather_json(call_counts(), group)
    if gathered is None:
        return None
    total: Counter[tuple[str, str]] = Counter()
    for counts in gathered:
        for op, of_op in counts.items():
            total.update({(op, kind): count for kind, count in of_op.items()})
    found: dict[str, dict[str, int]] = {}
    for (op, kind), count in sorted(total.items()):
        found.setdefault(op, {})[kind] = count
    return found


def write_calls(path: Path, chosen: dict[str, str], calls: dict[str, dict[str, int]]) -> str:
    """Keep both in ``path`` as JSON; one line of them."""
    record: dict[str, Any] = {"backends": chosen, "calls": calls}
    path.write_text(json.dumps(record, indent=1))
    each = [f"{op} {n} {k}" for op, of_op in calls.items() for k, n in of_op.items()]
    return f"op calls: {', '.join(each) or 'none'}"


def _named(kinds: dict[str, str], ops: list[str]) -> str:
    return ", ".join(f"{op} {kinds.get(op, 'not at all')}" for op in ops)
