"""A plan in words and tables, for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from megarl.mesh import Mesh
from megarl.plan.job import Plan
from megarl.plan.memory import GIB, StageMemory
from megarl.plan.parameters import active_parameters, total_parameters
from megarl.plan.search import Suggestion
from megarl.plan.traffic import gathered_bytes, pushed_bytes

_PARTS = {  # field of StageMemory -> column
    "parameters": "param",
    "gradients": "grad",
    "optimizer": "optim",
    "critic": "critic",
    "activations": "activ",
    "head": "head",
    "working": "work",
}
_MOST_ROWS = 8  # of the table of stages; of more only the telling ones are shown


def print_plan(plan: Plan, suggestions: Sequence[Suggestion] | None, console: Console) -> None:
    """The verdict first, then what it is made of. ``suggestions`` None: not asked for."""
    for line in _heading(plan):
        console.print(line, highlight=False)
    console.print(_verdict(plan), highlight=False)
    console.print(_stages(plan))
    for line in _movement(plan):
        console.print(line, highlight=False)
    if suggestions:
        experts = plan.job.spec.experts > 0
        console.print(_suggestions(suggestions, experts=experts))
        settings = layout_settings(suggestions[0].mesh, experts=experts)
        text = ", ".join(f"{name}: {n}" for name, n in settings.items())
        console.print(f"the first: parallel: {{{text}}}", highlight=False, markup=False)
    elif suggestions is not None:
        console.print("No layout of these GPUs fits.", highlight=False)


def layout_settings(mesh: Mesh, *, experts: bool) -> dict[str, int]:
    """The settings of ``parallel`` that say this layout; dp always, others where they are not 1."""
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp}
    found = {name: n for name, n in degrees.items() if n > 1} | {"dp": mesh.dp}
    found |= {"ep": mesh.ep, "etp": mesh.etp} if experts else {}
    found |= {"vpp": mesh.vpp} if mesh.vpp > 1 else {}
    ends = {"first_layers": mesh.first_layers, "last_layers": mesh.last_layers}
    return found | {name: n for name, n in ends.items() if n is not None}


def _text(mesh: Mesh, *, experts: bool) -> str:
    settings = layout_settings(mesh, experts=experts)
    return " ".join(f"{name.removesuffix('_layers')} {n}" for name, n in settings.items())


def _heading(plan: Plan) -> Iterator[str]:
    job, c = plan.job, plan.choices
    spec = job.spec
    total, active = total_parameters(spec) / 1e9, active_parameters(spec) / 1e9
    yield f"{spec.family}: {total:,.2f} B parameters, {active:,.2f} B active a token"
    yield f"{job.gpus} GPUs: {_text(plan.mesh, experts=spec.experts > 0)}"
    extras = [f"recompute {c.recompute}"]
    if c.recompute == "selective":
        extras[0] += f" ({', '.join(c.recompute_modules)})"
    extras += [f"{c.offloaded:.0%} of the optimizer on the host"] * (c.offloaded > 0)
    extras += ["FP8, parameters too" if c.fp8_stored else "FP8"] * c.fp8
    yield f"{c.dtype}, {', '.join(extras)}"
    yield (
        f"{plan.rows.count} rows of {job.row_tokens:,} tokens a rank and optimizer step "
        f"({job.samples:,} samples of {job.sample_tokens:,})"
    )


def _verdict(plan: Plan) -> str:
    heaviest, have = plan.heaviest, plan.job.gpu_bytes / GIB
    need = heaviest.total / GIB
    part = max(_PARTS, key=lambda name: getattr(heaviest, name))
    largest = f"most of it {part}, {getattr(heaviest, part) / GIB:,.1f} GiB"
    where = f"a rank of stage {heaviest.stage} needs {need:,.1f} of {have:g} GiB"
    if plan.fits:
        return f"[bold green]fits[/]: {where}, {have - need:,.1f} free; {largest}"
    return f"[bold red]does not fit[/]: {where}, {need - have:,.1f} too much; {largest}"


def _stages(plan: Plan) -> Table:
    table = _table("GiB of one rank, by pipeline stage")
    shown = [p for p in _PARTS if any(getattr(stage, p) for stage in plan.stages)]
    host = any(stage.host for stage in plan.stages)
    names = [_PARTS[part] for part in shown]
    head = ("stage", "layers", "B par", *names, "spare", "total", "rows", "a row")
    for name in (*head, *["on host"] * host):
        table.add_column(name, justify="right", no_wrap=True)
    runs = list(_runs(plan.stages))
    for first, last in runs if len(runs) <= _MOST_ROWS else _telling(plan, runs):
        stage = plan.stages[first]
        table.add_row(
            f"{first}" if first == last else f"{first}-{last}",
            str(stage.layers),
            f"{stage.count.parameters / 1e9:,.3f}",
            *(_gib(getattr(stage, name)) for name in (*shown, "allowance", "total")),
            f"{stage.rows_in_flight:g}",
            f"{stage.row / GIB:,.2f}",
            *[_gib(stage.host)] * host,
            style="bold" if plan.heaviest.stage in range(first, last + 1) else None,
        )
    return table


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _runs(stages: Sequence[StageMemory]) -> Iterator[tuple[int, int]]:
    """First and last of neighbouring stages that differ in nothing that is shown."""
    for _, group in groupby(stages, key=lambda s: (s.layers, s.count, s.rows_in_flight)):
        found = [stage.stage for stage in group]
        yield found[0], found[-1]


def _telling(plan: Plan, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first two, the heaviest, the one in the middle and the last two."""
    heaviest = next(i for i, run in enumerate(runs) if plan.heaviest.stage <= run[1])
    last = len(runs) - 1
    return [runs[i] for i in sorted({0, 1, heaviest, last // 2, last - 1, last})]


def _movement(plan: Plan) -> Iterator[str]:
    job, mesh = plan.job, plan.mesh
    idle = plan.bubble
    yield f"pipeline: idle {idle / (1 + idle):.1%} of the time ({idle:.3f} of the work)"
    moved = [
        f"{x.axis} {x.num_bytes / GIB:,.1f} {'in the node' if x.in_node else 'over the network'}"
        for x in plan.traffic
        if x.num_bytes
    ]
    yield f"a rank sends in an optimizer step, GiB: {', '.join(moved) or 'nothing'}"
    pushed = [pushed_bytes(job.spec, mesh, r, plan.choices) / GIB for r in range(mesh.pp)]
    gathered = max(gathered_bytes(job.spec, mesh, r, plan.choices) for r in range(mesh.pp))
    senders = (
        "the sender" if mesh.pp == 1 else f"{mesh.pp} senders, at most {max(pushed):,.1f} each"
    )
    yield (
        f"a weight push: {sum(pushed):,.1f} GiB to every server by {senders}; "
        f"{gathered / GIB:,.1f} GiB from a rank to its sender"
    )
    plain, routed = (n / GIB for n in plan.rollouts)
    text = f"rollouts of a step to a rank, at most: {plain:,.3f} GiB"
    if job.spec.experts:
        text += f", {routed:,.3f} with routed experts"
    yield text


def _suggestions(found: Sequence[Suggestion], *, experts: bool) -> Table:
    table = _table("layouts that fit, quickest first by a simple estimate (docs/plan.md)")
    for name in ("layout", "recompute", "GiB", "rows", "idle", "time"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for s in found:
        table.add_row(
            _text(s.mesh, experts=experts),
            s.choices.recompute,
            f"{s.heaviest / GIB:,.1f}",
            str(s.num_rows),
            f"{s.bubble / (1 + s.bubble):.1%}",
            f"{s.seconds / found[0].seconds:.2f}",
        )
    return table
