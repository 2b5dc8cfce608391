"""The charts of a report: metric series over steps -> SVG text that refers to nothing outside.

A chart is a row of ``CHARTS``: title, axis, and the series it draws. Series without a value in the
run are left out, charts without a series as well.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 600  # per line; longer runs are averaged in blocks
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """``lines``: metric -> label. ``band``: (lower, upper) metrics shaded behind them."""

    title: str
    lines: Mapping[str, str]
    unit: str = ""
    band: tuple[str, str] | None = None
    log: bool = False
    stacked: bool = False


CHARTS = (
    Chart("Reward", {"rollout/reward": "sampled"}),
    Chart(
        "Accuracy", {"rollout/accuracy": "sampled (train)", "eval/accuracy": "greedy (held-out)"}
    ),
    Chart("Entropy", {"policy/entropy": "policy"}, "nats a token"),
    Chart(
        "Ratio of new to old, a sequence",
        {"policy/seq_ratio_mean": "mean"},
        band=("policy/seq_ratio_min", "policy/seq_ratio_max"),
    ),
    Chart(
        "Ratio of new to old, a token",
        {"policy/ratio_mean": "mean"},
        band=("policy/ratio_min", "policy/ratio_max"),
    ),
    Chart(
        "Clipped",
        {
            "policy/seq_clipfrac": "sequences",
            "policy/clipfrac_high": "tokens, above",
            "policy/clipfrac_low": "tokens, below",
        },
        "share",
    ),
    Chart("Loss", {"policy/loss": "policy"}),
    Chart(
        "Trainer against server",
        {
            "mismatch/abs_logprob_diff": "|log-prob difference|",
            "mismatch/kl_rollout_train_k3": "KL (k3)",
        },
        "nats a token",
        log=True,
    ),
    Chart(
        "Response",
        {"rollout/response_length": "tokens", "policy/trained_tokens": "trained"},
        "tokens",
    ),
    Chart(
        "Load of experts above the mean",
        {
            "moe/load_max_violation": "largest, mean of layers",
            "moe/load_max_violation_worst": "largest, worst layer",
        },
        "max / mean - 1",
    ),
    Chart("Routers' entropy", {"moe/router_entropy": "mean of layers"}, "nats a token"),
    Chart("Cut off", {"rollout/truncated": "responses"}, "share"),
    Chart("Gradient norm", {"optim/grad_norm": "before clipping"}, log=True),
    Chart("Learning rate", {"optim/lr": "learning rate"}),
    Chart("Throughput", {"perf/tokens_per_s": "trained"}, "tokens/s"),
)


def charts(rows: Rows) -> list[tuple[str, str]]:
    """(title, data URI of an SVG) of every chart the run has values for, phases last."""
    found = [(c.title, _draw(c, rows)) for c in CHARTS]
    names = sorted({k for row in rows for k in row if k.startswith("time/")} - {"time/step"})
    phases = Chart(
        "Time of a step", {n: n.removeprefix("time/") for n in names}, "seconds", stacked=True
    )
    # A phase that a step does not have (an evaluation, a save) took no time in it.
    found.append((phases.title, _draw(phases, [dict.fromkeys(names, 0.0) | dict(r) for r in rows])))
    return [(title, _data_uri(svg)) for title, svg in found if svg is not None]


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of a metric, at most ``MAX_POINTS``: each the mean of a block."""
    points = [(float(r["step"]), float(r[name])) for r in rows if _finite(r.get(name))]
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    means = [tuple(sum(axis) / len(block) for axis in zip(*block, strict=True)) for block in blocks]
    return [m[0] for m in means], [m[1] for m in means]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw(chart: Chart, rows: Rows) -> str | None:
    from matplotlib.figure import Figure

    lines = {label: series(rows, name) for name, label in chart.lines.items()}
    lines = {label: points for label, points in lines.items() if points[0]}
    if not lines:
        return None
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _plot(axes, chart, lines, rows)
    if len(lines) > 1 or chart.band:
        axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def _plot(axes: Any, chart: Chart, lines: Mapping[str, Any], rows: Rows) -> None:
    if chart.band:
        low, high = (series(rows, name) for name in chart.band)
        if low[0] and low[0] == high[0]:
            axes.fill_between(low[0], low[1], high[1], alpha=0.2, label="min to max")
    if chart.stacked:
        x = next(iter(lines.values()))[0]
        axes.stackplot(x, *(y for _, y in lines.values()), labels=list(lines), alpha=0.8)
        return
    for label, (x, y) in lines.items():
        axes.plot(
            x, y, label=label, linewidth=1.4, marker="o" if len(x) < 25 else None, markersize=3
        )
    if chart.log and all(v > 0 for _, y in lines.values() for v in y):
        axes.set_yscale("log")


def _svg(figure: Any) -> str:
    """The ``<svg>`` element alone: no XML head, no document type, no metadata block."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    # Fixed ids and no date: the same run gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megarl"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(out, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
