"""``report.html``: a run on one page that can be mailed. No scripts, nothing loaded from elsewhere.

It is rebuilt from what lies in the run directory (metrics.jsonl, config.resolved.json, samples/),
at any time and after a crash as well; what is missing is left out. All text is escaped: responses
of a model in training are untrusted.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.monitor.plots import charts
from megarl.monitor.progress import duration
from megarl.monitor.samples import SampleText, describe, printable, read_samples, sample_steps
from megarl.monitor.sinks import read_metrics
from megarl.rundir import RunDir

_SAMPLES = 4  # of the first and of the last step
_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em;
        color: #222; background: #fff; }
 h1 { margin-bottom: 0; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; }
 .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 8px; }
 .charts img { width: 100%; }
 table { border-collapse: collapse; font-size: 13px; }
 td, th { border-bottom: 1px solid #eee; padding: 2px 14px 2px 0; text-align: left; }
 td.number { text-align: right; font-variant-numeric: tabular-nums; }
 pre { background: #f6f6f6; padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere;
       margin: 4px 0; }
 .muted { color: #777; } .response { background: #eef4fb; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="muted">{{ summary }}</p>
{% if charts %}
<h2>Curves</h2>
<div class="charts">
{% for name, image in charts %}<img src="{{ image }}" alt="{{ name }} over steps">
{% endfor %}</div>
{% endif %}
{% if numbers %}
<h2>Numbers</h2>
<table>
<tr><th>metric</th><th>first</th><th>last</th><th>least</th><th>most</th></tr>
{% for name, cells in numbers %}<tr><td>{{ name }}</td>
{% for cell in cells %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endif %}
{% for heading, samples in sample_groups %}
<h2>{{ heading }}</h2>
{% for sample in samples %}
<p>{{ sample.heading }}</p>
<pre>{{ sample.prompt }}</pre>
<pre class="response">{{ sample.response }}</pre>
<p class="muted">expected: {{ sample.answer }}</p>
{% endfor %}
{% endfor %}
{% if settings %}
<h2>Settings</h2>
<table>
{% for key, value in settings %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endif %}
</body>
</html>
"""


def write_report(run: RunDir) -> Path:
    """Build ``report.html`` from the run's files, whole or not at all; its path."""
    page = render_report(run)
    part = run.report.with_name(f"{run.report.name}.{os.getpid()}.part")
    part.write_text(page, "utf-8", errors="backslashreplace")
    os.replace(part, run.report)
    return run.report


def render_report(run: RunDir) -> str:
    from jinja2 import Environment, StrictUndefined

    rows = read_metrics(run.metrics)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        title=f"megarl run {run.root.resolve().name}",
        summary=_summary(rows),
        charts=charts(rows),
        numbers=_numbers(rows),
        sample_groups=_sample_groups(run.samples),
        settings=_settings(run.resolved_config),
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "No step has been recorded yet."
    last = rows[-1]
    times = [float(r["time"]) for r in rows if "time" in r]
    when = ""
    if times:
        start = datetime.fromtimestamp(times[0]).astimezone()
        took = f", {duration(times[-1] - times[0])} from first to last" if len(times) > 1 else ""
        when = f"; first recorded {start:%Y-%m-%d %H:%M %Z}{took}"
    return f"{len(rows)} steps recorded, the last is step {last['step']}{when}."


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """First, last, least and most of every metric; nan and inf are shown as such."""
    names = sorted({k for row in rows for k in row} - {"step", "time"})
    table = []
    for name in names:
        values = [r[name] for r in rows if isinstance(r.get(name), int | float)]
        if values:
            finite = [v for v in values if math.isfinite(v)] or [math.nan]
            cells = (values[0], values[-1], min(finite), max(finite))
            table.append((name, [f"{v:.6g}" for v in cells]))
    return table


def _sample_groups(folder: Path) -> list[tuple[str, list[dict[str, str]]]]:
    steps = sample_steps(folder) if folder.is_dir() else []
    return [
        (f"Samples of step {step}", [_sample(s) for s in read_samples(folder, step)[:_SAMPLES]])
        for step in dict.fromkeys([*steps[:1], *steps[-1:]])
    ]


def _sample(sample: SampleText) -> dict[str, str]:
    texts = {name: printable(getattr(sample, name)) for name in ("prompt", "response", "answer")}
    return {"heading": describe(sample), **texts}


def _settings(path: Path) -> list[tuple[str, str]]:
    if not path.exists():
        return []
    return list(_flatten(json.loads(path.read_text("utf-8"))))


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item)
