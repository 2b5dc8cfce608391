"""A plan for programs: plain values, bytes and counts, with the names of the tables."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megarl.plan.job import Plan
from megarl.plan.parameters import active_parameters, mtp_parameters, total_parameters
from megarl.plan.search import Suggestion
from megarl.plan.traffic import gathered_bytes, pushed_bytes


def as_record(plan: Plan, suggestions: Sequence[Suggestion] | None) -> dict[str, Any]:
    """What ``megarl plan --json`` writes."""
    job, mesh = plan.job, plan.mesh
    stages = range(mesh.pp)
    return {
        "model": {
            "family": job.spec.family,
            "parameters": total_parameters(job.spec),
            "active": active_parameters(job.spec),
            "mtp": mtp_parameters(job.spec),
        },
        "gpus": job.gpus,
        "gpu_bytes": job.gpu_bytes,
        "layout": asdict(mesh),
        "choices": asdict(plan.choices),
        "row_tokens": job.row_tokens,
        "sample_tokens": job.sample_tokens,
        "rows": plan.rows.count,
        "fits": plan.fits,
        "heaviest_stage": plan.heaviest.stage,
        "stages": [{**asdict(stage), "total": stage.total} for stage in plan.stages],
        "bubble": plan.bubble,
        "sent": [asdict(x) for x in plan.traffic],
        "pushed": [pushed_bytes(job.spec, mesh, r, plan.choices) for r in stages],
        "gathered": [gathered_bytes(job.spec, mesh, r, plan.choices) for r in stages],
        "rollouts": dict(zip(("plain", "with_routing"), plan.rollouts, strict=True)),
        "suggestions": [asdict(s) for s in suggestions or ()],
    }
