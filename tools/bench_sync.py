#!/usr/bin/env python3
"""How fast weights get from trainer ranks to servers, beside a raw broadcast of the same bytes.

    python tools/bench_sync.py [--layout ep=2] [--servers 2] [--dtype bf16] [--json FILE]
    python tools/bench_sync.py --sglang VENV                # a real SGLang server instead

push   everything that ``sync/push.py`` does: pause, gather, form, pack, send, load, digests at both
       ends, comparison, commit. Real trainer ranks, real servers, of a generated model.
floor  the same senders broadcast buffers of the same sizes with ``torch.distributed.broadcast`` to
       as many processes as there are servers, over the same backend; each bucket is copied once at
       each end.
raw    that without the copies.

They take turns, in one run, in processes that wait while it is another's turn. ``vs_raw_broadcast``
is the median time of the floor by that of pushes, so 1 is a push that costs nothing beyond moving
and copying its bytes. ``verify_share``: of the push, the wait for servers' digests, and what the
slowest sender needs to digest: its passes that digest and copy, less what the floor needs to copy
as much. ``verify_share_with_copies``: the passes as they are. ``stall_seconds``: servers
sample nothing. ``cpu_seconds``: of all processes together; where all cores are busy, they
by the number of cores are the least time there is.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sync_model import SIZES, generate  # noqa: E402
from sync_ranks import REGION, TIMEOUT_S, Task, receiver, trainer  # noqa: E402
from sync_servers import Engine, started  # noqa: E402

from megarl.mesh import Mesh  # noqa: E402
from megarl.sync.group import create_store  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=given.folder) as name:
        found = run(given, Path(name))
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layout", nargs="+", default=["ep=2", "dp=2"], metavar="AXIS=N", help="of trainer ranks"
    )
    parser.add_argument(
        "--senders", type=int, help="of each pipeline stage, default all of its ranks, at most 4"
    )
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of both ends")
    parser.add_argument(
        "--transport", choices=("broadcast", "colocated", "disk"), default="broadcast"
    )
    parser.add_argument("--delta", action="store_true", help="here: nothing changes")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--sglang", type=Path, metavar="VENV")
    parser.add_argument("--repeats", type=int, default=5)
    for name, (default, key) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=key)
    parser.add_argument("--folder", type=Path, help="for the model, default the system's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    given.senders = given.senders or min(4, mesh_of(given.layout).stage_size)
    return given


def mesh_of(layout: Sequence[str]) -> Mesh:
    sizes = {axis: int(n) for axis, _, n in (word.partition("=") for word in layout)}
    return Mesh(**{"etp": sizes.get("tp", 1), **sizes})


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes = {name: getattr(given, name.replace("-", "_")) for name in SIZES}
    model = generate(folder, sizes)
    engine = Engine(given.sglang, given.dtype)
    with started(engine, model, folder / "run", given.servers) as servers:
        measured = measure(given, model, servers)
    layout = " ".join(given.layout)
    return {
        "case": {
            "layout": layout,
            "senders": given.senders,
            "servers": given.servers,
            "dtype": given.dtype,
            "transport": given.transport,
            "delta": given.delta,
            "bucket_mb": given.bucket_mb,
            "engine": "sglang" if given.sglang else "embedded",
        },
        "model": sizes,
        "cores": len(os.sched_getaffinity(0)),
        **measured,
    }


def measure(
    given: argparse.Namespace, model: Path, servers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Two warm pushes, of which the first may send everything twice (servers prove themselves), one
    warm floor, then by turns.
    """
    with ranks(given, model, servers) as (trainers, senders, receivers):
        first, version = ask(trainers, "push", 1), 2
        sizes = [found["sizes"] for found in ask(trainers, "push", version)]

        def floor(copies: bool) -> list[dict[str, Any]]:
            for process in receivers:
                process.ask("floor", [sizes[rank] for rank in senders], copies)
            for process, of in zip(trainers, sizes, strict=True):
                process.ask("floor", of, copies)
            return [process.answer() for process in [*trainers, *receivers]]

        floor(True)
        samples: dict[str, list[list[dict[str, Any]]]] = {"floor": [], "push": [], "raw": []}
        for _ in range(given.repeats):
            samples["floor"].append(floor(True))
            version += 1
            samples["push"].append(ask(trainers, "push", version))
            samples["raw"].append(floor(False))
    return summary(samples, first, int(given.bucket_mb * 2**20), len(servers))


@contextmanager
def ranks(
    given: argparse.Namespace, model: Path, servers: list[dict[str, Any]]
) -> Iterator[tuple[list["Process"], list[int], list["Process"]]]:
    """Trainer ranks, which of them send, and receivers of the raw broadcast: all ready."""
    mesh = mesh_of(given.layout)
    senders = [rank for pp in range(mesh.pp) for rank in mesh.senders(pp, given.senders)]
    default = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = {rank: create_store("127.0.0.1", timeout_s=TIMEOUT_S) for rank in senders}
    ports = {rank: port for rank, (_, port) in stores.items()}
    bucket = int(given.bucket_mb * 2**20)
    region = min(REGION, 4 * bucket)
    every = settings(given, model)
    processes: list[Process] = []
    try:
        for k in range(len(servers)):
            raw = list(ports.values()), 1 + k, 1 + len(servers), bucket, region
            processes.append(Process(receiver, *raw))
        for rank in range(mesh.world_size):
            task = Task(rank, default.port, mesh, every, servers, ports, region)
            processes.append(Process(trainer, task))
        for process in reversed(processes):  # receivers come last: they wait for the others
            process.answer()
        yield processes[len(servers) :], senders, processes[: len(servers)]
    finally:
        for process in processes:
            process.close()


class Process:
    """One of sync_ranks.py."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *what: Any) -> None:
        self._pipe.send(what)

    def answer(self) -> Any:
        """Raises RuntimeError when there is none in time."""
        try:
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a process has died; see above") from None
        raise RuntimeError(f"a process did not answer within {TIMEOUT_S:g} s")

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def settings(given: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Of a run; most matters to nobody here."""
    engine = Engine(given.sglang, given.dtype)
    return {
        "run": {"dir": str(model.parent / "trainer"), "mode": "rl", "steps": 1},
        "model": {"hf": str(model)},
        "algo": {"policy": {"name": "gspo"}},
        "optim": {"lr": 1e-6},
        "precision": {"dtype": given.dtype},
        "data": {"prompts": "unused"},
        "rollout": engine.section(given.servers),
        "sync": {
            "transport": given.transport,
            "senders": given.senders,
            "bucket_mb": given.bucket_mb,
            "delta": given.delta,
            "backend": "gloo",
        },
    }


def ask(processes: Sequence[Process], *what: Any) -> list[dict[str, Any]]:
    for process in processes:
        process.ask(*what)
    return [process.answer() for process in processes]


def summary(
    samples: dict[str, list[list[dict[str, Any]]]],
    first: list[dict[str, Any]],
    bucket: int,
    servers: int,
) -> dict[str, Any]:
    """A measurement is as slow as its slowest process."""
    seconds = {
        side: [max(found["seconds"] for found in everyone) for everyone in rounds]
        for side, rounds in samples.items()
    }
    median = {side: statistics.median(of) for side, of in seconds.items()}
    cpu = {
        side: statistics.median(
            sum(
                found["cpu_seconds"] + sum(found.get("server_cpu_seconds", []))
                for found in everyone
            )
            for everyone in rounds
        )
        for side, rounds in samples.items()
    }
    pushes = samples["push"]
    receipts = [everyone[0]["receipt"] for everyone in pushes]
    sizes = [found["sizes"] for found in pushes[0]]
    num_bytes = receipts[0]["num_bytes"]

    def middle(name: str) -> float:
        return statistics.median(max(found[name] for found in everyone) for everyone in pushes)

    return {
        "bytes": num_bytes,
        "tensors": receipts[0]["tensors"],
        "bytes_by_sender": [sum(of) for of in sizes],
        "calls": receipts[0]["calls"],
        "fewest_calls": sum(math.ceil(sum(of) / bucket) for of in sizes),
        "vs_raw_broadcast": median["floor"] / median["push"],
        "vs_raw_alone": median["raw"] / median["push"],
        **verification(pushes, samples["floor"]),
        "stall_seconds": statistics.median(r["stall_seconds"] for r in receipts),
        "gigabytes_per_second": {side: num_bytes / of / 1e9 for side, of in median.items()},
        "median_seconds": median,
        "cpu_seconds": cpu,
        "seconds": seconds,
        "first_push_seconds": max(found["seconds"] for found in first),
        "gather_seconds": middle("gather_seconds"),
        "send_seconds": middle("send_seconds"),
        "verify_seconds": statistics.median(r["verify_seconds"] for r in receipts),
        "bucket_bytes": bucket,
        "peak_bytes": [
            max(r[k]["peak_bytes"] for r in [first, *pushes]) for k in range(len(first))
        ],
        "server_peak_bytes": list(
            map(max, *(everyone[0]["server_peak_bytes"] for everyone in pushes), [0] * servers)
        ),
    }


def verification(
    pushes: list[list[dict[str, Any]]], floors: list[list[dict[str, Any]]]
) -> dict[str, float]:
    copies = statistics.median(max(found.get("copy_seconds", 0.0) for found in f) for f in floors)
    shares, with_copies = [], []
    for everyone in pushes:
        receipt = everyone[0]["receipt"]
        passes = max(found["digest_seconds"] for found in everyone)
        confirm = receipt["verify_seconds"] - passes
        shares.append((max(passes - copies, 0.0) + confirm) / receipt["seconds"])
        with_copies.append(receipt["verify_seconds"] / receipt["seconds"])
    return {
        "verify_share": statistics.median(shares),
        "verify_share_with_copies": statistics.median(with_copies),
        "copy_seconds": copies,
    }


def show(found: dict[str, Any]) -> None:
    case = ", ".join(f"{name} {value}" for name, value in found["case"].items())
    size = f"{found['bytes'] / 1e9:.2f} GB, {found['tensors']} tensors"
    print(f"{case}: {size}, {found['cores']} cores")
    for side, seconds in found["median_seconds"].items():
        rounds = " ".join(f"{s:.3f}" for s in found["seconds"][side])
        rate = found["gigabytes_per_second"][side]
        cpu = found["cpu_seconds"][side]
        print(f"{side:6} {seconds:7.3f} s {rate:6.2f} GB/s  CPU {cpu:.2f} s  ({rounds})")
    alone = f"without copies {found['vs_raw_alone']:.2f}"
    print(f"vs_raw_broadcast {found['vs_raw_broadcast']:.2f}, {alone}")
    beside = f"with its copies {found['verify_share_with_copies']:.1%}"
    stall = f"stall {found['stall_seconds']:.3f} s"
    print(f"verify_share {found['verify_share']:.1%}, {beside}, {stall}")
    print(f"gather {found['gather_seconds']:.3f} s, send {found['send_seconds']:.3f} s")
    print(f"calls {found['calls']} ({found['fewest_calls']} buckets' worth)")
    peaks = [f"{peak / found['bucket_bytes']:.2f}" for peak in found["peak_bytes"]]
    servers = [f"{peak / found['bucket_bytes']:.2f}" for peak in found["server_peak_bytes"]]
    print(f"peak memory in buckets: ranks {' '.join(peaks)}, servers {' '.join(servers)}")


if __name__ == "__main__":
    sys.exit(main())
