"""Results of all ranks made one, and compared. Imports nothing of Megatron."""

from typing import Any

from megarl.mesh import Mesh
from megarl.monitor.metrics import merge_metrics, scalar


def mesh_of(layout: dict[str, int]) -> Mesh:
    return Mesh(**{"etp": layout.get("tp", 1), **layout})


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from those of all ranks: metrics reduced, tensors of all stages together."""
    steps = zip(*(r["metrics"] for r in results), strict=True)
    return {
        "metrics": [{m.name: scalar(m.value) for m in merge_metrics(parts)} for parts in steps],
        "logprobs": {k: v for r in results for k, v in r.get("logprobs", {}).items()},
        "gradients": {n: t for r in results for n, t in r["gradients"].items()},
        "weights": {n: t for r in results for n, t in r["weights"].items()},
    }


def emulated(**fp8: Any) -> dict[str, Any]:
    """fp32, so that only FP8 rounds: what differs then is FP8's doing."""
    return {"dtype": "fp32", "fp8": {"backend": "emulated", **fp8}}
