"""The plots of ``tools/moe_stability.py``, from what its cells left."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Found = dict[str, Any]  # a cell's: "cell", "steps"

CURVES = (  # file, metric, label, what is drawn at least on a logarithmic axis
    ("accuracy.png", "rollout/accuracy", "accuracy of samples", None),
    ("gradient_norm.png", "optim/grad_norm", "gradient norm", 1e-2),
    ("entropy.png", "policy/entropy", "entropy, nats a token", None),
    ("server_kl.png", "mismatch/kl_rollout_train_k3", "KL(server, trainer), nats a token", 1e-5),
)
GATES = {  # the share of tokens or sequences that an objective holds back
    "grpo": (("policy/clipfrac_high", "clipped above"), ("policy/clipfrac_low", "clipped below")),
    "aspo": (
        ("policy/clipfrac_high", "clipped above"),
        ("policy/clipfrac_low", "clipped below"),
        ("policy/clipfrac_dual", "capped"),
    ),
    "gspo": (("policy/seq_clipfrac", "sequences clipped"),),
    "sapo": (
        ("policy/gatefrac_low", "gates below 1/2"),
        ("policy/seq_gates_differ", "sequences whose assumptions fail"),
    ),
}
MISMATCH = (
    ("mismatch/kl_rollout_train_k3", "KL(server, trainer), nats a token"),
    ("mismatch/abs_logprob_diff", "|log-prob difference|"),
    ("moe/replay_changed", "choices that replay changed, share"),
)


def write_plots(out: Path, found: Sequence[Found]) -> None:
    found = [f for f in found if f["steps"]]
    if not found:
        return
    plain = [f for f in found if _mitigation(f) == "none"]
    if plain:
        for file, metric, label, least in CURVES:
            log = least is not None
            _save(_grid(plain, _curve(metric, least or -math.inf), label, log), out / file)
        _save(_grid(plain, _gates, "share", False), out / "gates.png")
    _save(_bars(found, MISMATCH), out / "mismatch.png")
    results = (
        ("eval/accuracy", "greedy accuracy at the end"),
        ("rollout/accuracy", "accuracy of samples, last steps"),
        ("optim/grad_norm", "gradient norm, last steps"),
        ("correction/kept_tokens", "tokens that a correction keeps"),
    )
    _save(_bars(found, results), out / "mitigations.png")


def _grid(found: Sequence[Found], draw: Callable[..., None], label: str, log: bool) -> Figure:
    """Objectives down, conditions across; means over seeds, bands from the least to the most."""
    objectives, conditions = _values(found, "objective"), _values(found, "condition")
    size = (2.6 * len(conditions) + 1, 1.9 * len(objectives) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(
        len(objectives), len(conditions), sharex=True, sharey="row", squeeze=False
    )
    for i, objective in enumerate(objectives):
        for j, condition in enumerate(conditions):
            at = axes[i][j]
            runs = [f for f in found if _is(f, objective=objective, condition=condition)]
            draw(at, objective, runs)
            at.set_title(f"{objective}, {condition}", fontsize=8, loc="left")
            at.tick_params(labelsize=7, which="both")
            at.grid(alpha=0.25)
            if at.get_legend_handles_labels()[0] and j == 0:
                at.legend(fontsize=6)
        if log and any(at.lines for at in axes[i]):  # an axis of nothing has no logarithms
            axes[i][0].set_yscale("log")
    figure.supxlabel("step", fontsize=8)
    figure.supylabel(label, fontsize=8)
    return figure


def _curve(metric: str, least: float) -> Callable[..., None]:
    def draw(at: Any, objective: str, runs: Sequence[Found]) -> None:
        _band(at, runs, metric, None, least)

    return draw


def _gates(at: Any, objective: str, runs: Sequence[Found]) -> None:
    for metric, label in GATES[objective]:
        _band(at, runs, metric, label)


def _band(
    at: Any, runs: Sequence[Found], metric: str, label: str | None, least: float = -math.inf
) -> None:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step in run["steps"]:
            if least <= step.get(metric, math.nan) < math.inf:
                by_step.setdefault(int(step["step"]), []).append(step[metric])
    steps = sorted(by_step)
    if not steps:
        return
    means = [sum(by_step[s]) / len(by_step[s]) for s in steps]
    (line,) = at.plot(steps, means, linewidth=1, label=label)
    lowest, highest = ([pick(by_step[s]) for s in steps] for pick in (min, max))
    at.fill_between(steps, lowest, highest, alpha=0.2, color=line.get_color(), linewidth=0)


def _bars(found: Sequence[Found], metrics: Sequence[tuple[str, str]]) -> Figure:
    """A panel a metric and condition: a bar a mitigation, a dot a run, its colour the objective;
    of the objectives that have mitigations, if any. Mismatches are means over all steps, results
    over the last five.
    """
    objectives = _values([f for f in found if _mitigation(f) != "none"], "objective")
    objectives = objectives or _values(found, "objective")
    found = [f for f in found if f["cell"]["objective"] in objectives]
    conditions = _values(found, "condition")
    size = (2.8 * len(conditions) + 1, 2.2 * len(metrics))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(metrics), len(conditions), sharey="row", squeeze=False)
    for i, (metric, label) in enumerate(metrics):
        for j, condition in enumerate(conditions):
            at = axes[i][j]
            runs = [f for f in found if _is(f, condition=condition)]
            names = list(dict.fromkeys(map(_mitigation, runs)))
            for k, name in enumerate(names):
                of_name = [f for f in runs if _mitigation(f) == name]
                _bar(at, k, of_name, metric, objectives)
            at.set_xticks(range(len(names)), names, rotation=45, fontsize=7)
            at.tick_params(axis="y", labelsize=7)
            at.set_title(condition, fontsize=8, loc="left")
            if i == j == 0 and at.get_legend_handles_labels()[0]:
                at.legend(fontsize=6)
        axes[i][0].set_ylabel(label, fontsize=7)
    return figure


def _bar(at: Any, k: int, runs: Sequence[Found], metric: str, objectives: list[str]) -> None:
    values = [(f["cell"]["objective"], _mean(f, metric)) for f in runs]
    finite = [(objective, v) for objective, v in values if math.isfinite(v)]
    if not finite:
        return
    at.bar(k, sum(v for _, v in finite) / len(finite), color="0.88")
    for n, objective in enumerate(objectives):
        dots = [v for of, v in finite if of == objective]
        label = objective if k == 0 else None
        places = [k + 0.2 * (n - (len(objectives) - 1) / 2)] * len(dots)
        at.plot(places, dots, ".", color=f"C{n}", markersize=4, label=label)


def _mean(found: Found, metric: str) -> float:
    whole = metric.startswith(("mismatch/", "moe/"))
    steps = found["steps"] if whole else found["steps"][-5:]
    values = [s[metric] for s in steps if metric in s]
    return sum(values) / len(values) if values else math.nan


def _mitigation(found: Found) -> str:
    cell = found["cell"]
    parts = [cell[name] for name in ("replay", "correction") if cell[name] != "none"]
    return "+".join(parts) or "none"


def _values(found: Sequence[Found], name: str) -> list[str]:
    return list(dict.fromkeys(f["cell"][name] for f in found))


def _is(found: Found, **wanted: str) -> bool:
    return all(found["cell"][name] == value for name, value in wanted.items())


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})
