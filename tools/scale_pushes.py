"""The time of a weight push on paper: three models, 8 to 512 GPUs, from bytes and rates.

    .venv/bin/python tools/scale_pushes.py [--json FILE] [--senders 1] [--bucket-mb 1024]
                                           [--rate nic=25e9 ...]

Half of the GPUs train, half serve. Bytes, tensors and buckets are exact (``scale_push_sizes.py``);
rates are assumed, or were measured on a core here (``scale_push_rates.py``). The push is that of
``megarl/sync/push.py`` over NCCL to SGLang:

1. A stage's sender gathers, quantises, digests and packs bucket after bucket ("making"). Stages do
   so at the same time, and so do senders of a stage, each of which has some expert-parallel ranks'
   experts to gather.
2. A bucket's turn: the message to every server, one broadcast to all, and every server's loader,
   its digest and its reply. Servers take one bucket at a time, so that turns of all senders add up.
   A sender makes the next bucket meanwhile.
3. All servers' digests come to rank 0 and are compared: every tensor-parallel rank tells its own.
   Where changes are sent, they also come before.

With M the making of the slowest stage and S all turns, seconds are max(M, S), a bucket of the
other, and what is around: ``begin``, the comparison, ``commit``. docs/scale.md tells what comes
out.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from scale_push_rates import Rates
from scale_push_sizes import (
    FORMS,
    LAYOUTS,
    Bucket,
    Weight,
    buckets,
    by_sender,
    spec_of,
    total,
    weights_of,
)

from megarl.mesh import Mesh

NODE = 8  # GPUs that NVLink connects
CONTROL_CALLS = 7  # of begin, digest and commit, which are three requests' worth of sessions
SESSIONS = 3


@dataclass(frozen=True)
class Case:
    """``delta``: share of the bytes that a push sends of a change, None: all."""

    model: str
    form: str
    trainers: int
    senders: int = 1
    bucket: int = 1024 << 20
    rates: Rates = field(default_factory=Rates)
    delta: float | None = None

    @property
    def mesh(self) -> Mesh:
        return LAYOUTS[self.model].meshes[self.trainers]

    @property
    def server(self) -> int:
        return LAYOUTS[self.model].server[self.form]

    @property
    def servers(self) -> int:
        return self.trainers // self.server

    @property
    def expert_ranks(self) -> int:
        """How many expert-parallel ranks' experts come together on one sender."""
        groups = self.mesh.stage_size // (self.mesh.ep * self.mesh.etp)
        return self.mesh.ep // min(max(1, self.senders // groups), self.mesh.ep)

    @property
    def link(self) -> tuple[float, str]:
        """Bytes a second of a broadcast to all servers, and what they are limited by."""
        rates, name = self.rates, f"{self.model} on {2 * self.trainers}"
        assert self.servers, f"{name}: no server has room"
        if 2 * self.trainers <= NODE:
            return rates.nvlink, "NVLink"
        ways = {
            "sender's card": rates.cards * rates.nic,
            "servers' cards": min(NODE, self.trainers) * rates.nic,
            "NVLink": rates.nvlink,
        }
        limit = min(ways, key=lambda way: ways[way])
        return ways[limit], limit

    def sent(self) -> list[list[list[Weight]]]:
        weights, layers = weights_of(self.model, self.form), spec_of(self.model).layers
        return by_sender(weights, layers, self.mesh, self.senders)


# --- seconds --------------------------------------------------------------------------------------


def making(case: Case, weights: Sequence[Weight]) -> dict[str, float]:
    """Seconds of one sender for what it sends, by what takes them."""
    rates, mesh = case.rates, case.mesh
    gather, ep = 0.0, case.expert_ranks
    for expert, size in ((True, ep * mesh.etp), (False, mesh.tp)):
        mine = [weight for weight in weights if (weight.expert is not None) == expert]
        source = sum(weight.source for weight in mine)
        near, far = (min(size, NODE) - 1) / size, max(0, size - NODE) / size
        gather += source * (near / rates.nvlink + far / rates.nic)
        if size > 1:
            gather += len(mine) / (ep if expert else 1) * rates.gather_s
    num_bytes = total(weights)
    seconds = {
        "gather": gather,
        "quantise": sum(weight.quantised for weight in weights) / rates.quantise,
        "digest": num_bytes / rates.digest,
        "pack": 2 * num_bytes / rates.memory,
        "sender's process": sum(weight.tensors for weight in weights) * rates.pack_s,
    }
    if case.delta is not None:  # what was last pushed lies in host memory, and is compared there
        seconds["changes"] = num_bytes * (1 / rates.pcie + 1 / rates.encode)
    return seconds


def turns(case: Case, sent: Sequence[Bucket]) -> dict[str, float]:
    """Seconds of all turns of one sender, by what takes them."""
    rates, n, (rate, limit) = case.rates, len(sent), case.link
    num_bytes = sum(bucket.num_bytes for bucket in sent)
    tensors = sum(bucket.tensors for bucket in sent)
    if case.delta is not None:
        n = max(1, round(n * case.delta))  # a bucket holds that many more tensors
    moved = num_bytes * (1.0 if case.delta is None else case.delta)
    seconds = {
        limit: moved / rate + n * (1 + case.trainers) * rates.hop_s,
        "requests": n * (rates.call_s + case.servers * rates.request_s),
        "servers' processes": tensors * (rates.load_s + rates.server_digest_s),
        "servers' memory": num_bytes * (1 / rates.server_digest + 2 / (case.server * rates.memory)),
    }
    if case.delta is not None:  # every rank makes the whole tensors of what it has kept
        seconds["changes"] = num_bytes * (1 / rates.apply + 1 / rates.pcie)
    return seconds


def overlapped(made_s: Sequence[float], turns_s: float, num_buckets: Sequence[int]) -> float:
    """Seconds of making and turns together. ``made_s``: of each sender that makes at the same time
    as the others; ``num_buckets``: of each. The first bucket is made before any turn, or the last
    one's turn comes when everything is made.
    """
    slowest = max(made_s)
    if turns_s >= slowest:
        first = min(s / n for s, n in zip(made_s, num_buckets, strict=True))
        return turns_s + first
    return slowest + turns_s / sum(num_buckets)


def push(case: Case) -> dict[str, Any]:
    """Everything about one case."""
    rates, stages = case.rates, case.sent()
    made: list[dict[str, float]] = []
    taken: dict[str, float] = {}
    counts, told, num_bytes, tensors = [], 0, 0, 0
    for stage in stages:
        parts: dict[str, float] = {}
        count = 0
        for weights in stage:
            of_sender = buckets((g for w in weights for g in w.groups), case.bucket)
            _add(parts, making(case, weights), 1 / case.senders)
            _add(taken, turns(case, of_sender))
            count += len(of_sender)
            told += sum(weight.told for weight in weights)
            num_bytes += total(weights)
            tensors += sum(weight.tensors for weight in weights)
        made.append(parts)
        counts.append(count)
    times = 1 if case.delta is None else 2  # what servers hold is asked for before, too
    compare = told * (1 + times * case.trainers) / rates.json  # the senders' own come once
    control = CONTROL_CALLS * rates.call_s + SESSIONS * case.servers * rates.request_s
    making_s = [sum(parts.values()) for parts in made]
    turns_s = sum(taken.values())
    slowest = max(made, key=lambda parts: sum(parts.values()))
    candidates = dict(taken if turns_s >= max(making_s) else slowest)
    candidates["comparison"] = compare
    return {
        "gigabytes": num_bytes / 1e9,
        "tensors": tensors,
        "buckets": sum(counts),
        "making": max(making_s),
        "making_parts": slowest,
        "turns": turns_s,
        "turns_parts": taken,
        "compare": compare,
        "control": control,
        "seconds": overlapped(making_s, turns_s, counts) + compare + control,
        "decides": max(candidates, key=lambda name: candidates[name]),
    }


def colocated(form: str, rates: Rates) -> dict[str, float]:
    """Seconds of Qwen3-30B-A3B on one node whose eight GPUs train and serve (tp 8): buckets stay
    where they are packed, and the other ranks read them there, whole for the digest, and their
    part.
    """
    case = Case("qwen3-30b-a3b", form, NODE, rates=rates)
    weights = case.sent()[0][0]
    sent = buckets((g for w in weights for g in w.groups), case.bucket)
    made = sum(making(case, weights).values())
    num_bytes, others = total(weights), NODE - 1
    read = num_bytes * (others + others / NODE) / rates.nvlink
    calls = len(sent) * (rates.call_s + rates.request_s)
    loaded = sum(bucket.tensors for bucket in sent) * (rates.load_s + rates.server_digest_s)
    told = sum(weight.told for weight in weights) * (1 + NODE) / rates.json
    around = CONTROL_CALLS * rates.call_s + SESSIONS * rates.request_s
    seconds = overlapped([made], read + calls + loaded, [len(sent)]) + told + around
    return {"making": made, "read": read, "loaded": loaded, "compare": told, "seconds": seconds}


def _add(into: dict[str, float], parts: Mapping[str, float], times: float = 1.0) -> None:
    for name, value in parts.items():
        into[name] = into.get(name, 0.0) + value * times


# --- tables ---------------------------------------------------------------------------------------


def main_table(cases: Sequence[Case]) -> tuple[list[str], list[dict[str, Any]]]:
    head = "| model, form | GPUs | stages x ranks | servers x GPUs | buckets | making | link |"
    lines = [
        f"{head} servers | requests | compare | **seconds** | decides |",
        "|---|" + "--:|" * 10,
    ]
    lines[1] += "---|"
    found = []
    for case in cases:
        of = push(case)
        parts, limit = of["turns_parts"], case.link[1]
        loaded = parts["servers' processes"] + parts["servers' memory"]
        cells = [
            f"{case.model}, {case.form}",
            str(2 * case.trainers),
            f"{case.mesh.pp} x {case.mesh.stage_size}",
            f"{case.servers} x {case.server}",
            str(of["buckets"]),
            *map(_shown, (of["making"], parts[limit], loaded, parts["requests"] + of["control"])),
            _shown(of["compare"]),
            f"**{_shown(of['seconds'])}**",
            of["decides"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
        found.append({**_named(case), **of})
    return lines, found


def rate_table(rates: Rates) -> list[str]:
    lines = ["| rate | | |", "|---|--:|---|"]
    for rate in fields(rates):
        value: float = getattr(rates, rate.name)
        if rate.name.endswith("_s"):
            value_text = f"{value * 1e6:g} us" if value < 1e-3 else f"{value * 1e3:g} ms"
        else:
            value_text = f"{value / 1e9:g} GB/s" if value > NODE else f"{value:g}"
        lines.append(f"| `{rate.name}` | {value_text} | {rate.metadata['known']}: ")
        lines[-1] += f"{rate.metadata['what']} |"
    return lines


def size_table() -> list[str]:
    lines = ["| model, form | GB | tensors | largest, GB | digests as JSON, MB |"]
    lines.append("|---|" + "--:|" * 4)
    for name in LAYOUTS:
        for form in FORMS:
            weights = weights_of(name, form)
            largest = max(size for weight in weights for size, _ in weight.groups)
            cells = [
                f"{name}, {form}",
                f"{total(weights) / 1e9:.1f}",
                f"{sum(weight.tensors for weight in weights):,}",
                f"{largest / 1e9:.2f}",
                f"{sum(weight.told for weight in weights) / 1e6:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def variants(case: Case) -> dict[str, Case]:
    """What else one could have."""
    rates, slow = case.rates, replace(case.rates, nic=10e9)
    plain = replace(rates, server_digest=44e9, server_digest_s=430e-6)
    return {
        "as above": case,
        "`sync.bucket_mb: 256`": replace(case, bucket=256 << 20),
        "`sync.bucket_mb: 4096`": replace(case, bucket=4096 << 20),
        "`sync.senders: 4`": replace(case, senders=4),
        "servers digest without megarl's operator": replace(case, rates=plain),
        "a sender has all eight cards of its node": replace(
            case, rates=replace(rates, cards=float(NODE))
        ),
        "cards of 100 Gb/s": replace(case, rates=slow),
        "a change of 10 %": replace(case, delta=0.1),
        "a change of 10 %, cards of 100 Gb/s": replace(case, delta=0.1, rates=slow),
    }


def variant_table(cases: Sequence[Case]) -> tuple[list[str], list[dict[str, Any]]]:
    lines = [f"| | {' | '.join(f'{case.model}, {case.form}' for case in cases)} |"]
    lines.append("|---|" + "--:|" * len(cases))
    found = []
    for name in variants(cases[0]):
        pushed = [(case, push(variants(case)[name])) for case in cases]
        lines.append(f"| {name} | {' | '.join(_shown(of['seconds']) for _, of in pushed)} |")
        found += [{"variant": name, **_named(case), **of} for case, of in pushed]
    return lines, found


def colocated_table(here: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = list(next(iter(here.values())))
    lines = [f"| colocated | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for form, of in here.items():
        lines.append(f"| qwen3-30b-a3b, {form} | {' | '.join(map(_shown, of.values()))} |")
    return lines


def _named(case: Case) -> dict[str, Any]:
    layout = asdict(case.mesh)
    return {"model": case.model, "form": case.form, "gpus": 2 * case.trainers, "layout": layout}


def _shown(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


# --- the program ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    given = _arguments(arguments)
    rates = replace(Rates(), **dict(given.rate))
    options = {"senders": given.senders, "bucket": int(given.bucket_mb * 2**20), "rates": rates}
    cases = [
        Case(name, form, trainers, **options)
        for name, layout in LAYOUTS.items()
        for form in FORMS
        for trainers in layout.meshes
    ]
    largest = [case for case in cases if 2 * case.trainers == 512]
    sizes = size_table()
    rows, pushed = main_table(cases)
    others, varied = variant_table(largest)
    here = {form: colocated(form, rates) for form in FORMS}
    found = {"rates": asdict(rates), "pushes": pushed, "variants": varied, "colocated": here}
    tables = [rate_table(rates), sizes, rows, others, colocated_table(here)]
    print("\n\n".join("\n".join(table) for table in tables))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    return found


def _given(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    known = [rate.name for rate in fields(Rates)]
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name}: found no such rate; accepted: {known}")
    return name, float(value)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--senders", type=int, default=1, choices=range(1, 5))
    parser.add_argument("--bucket-mb", type=float, default=1024)
    parser.add_argument("--rate", type=_given, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", help="file for everything that was found")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
