"""What a collector's process takes: samples a second, and routing tables in MB/s, on one core.

    .venv/bin/python tools/bench_rollout.py [--seconds 10] [--memory-seconds 60] [--json FILE]

A server in a process of its own answers every /generate at once with prepared bytes, so that what
is measured is the collector: requests and replies over HTTP, parsing, every check, text, reward,
and the way to the trainer's ``take``. The collector is pinned to one core (``--core``), server and
trainer to the others.

small    groups of 8, 512 sequences in flight, prompts of 128 tokens, responses of 64
routing  groups of 8, 64 sequences in flight, prompts of 128 tokens, responses of 512, with the 8
         experts of 48 layers: MB/s of what the server sends, by number of experts
memory   ``routing`` for a minute: the collector's resident memory at its start, middle and end

``per_second`` is by the clock, ``per_cpu_second`` by the process's own CPU time: what it would be
on a core that nobody else uses. Where the two are far apart, the machine was busy.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.rollout.collector import Collector, CollectorSettings
from megarl.types import GroupRequest, Member, Prompt, RoutingShape, Sampling

EOS, VOCAB = 1, 4096
GROUP, PROMPT = 8, 128
LAYERS, TOP_K = 48, 8
_RIDS = re.compile(rb'"rid":\[([^\]]*)\]')


@dataclass(frozen=True)
class Load:
    """What is asked for and answered."""

    response: int
    in_flight: int  # sequences
    experts: int = 0  # 0: no routing

    @property
    def routing(self) -> RoutingShape | None:
        return RoutingShape((True,) * LAYERS, TOP_K, self.experts) if self.experts else None


SMALL = Load(response=64, in_flight=512)
ROUTING = [Load(512, 64, experts) for experts in (128, 256, 384)]


# --- the server -----------------------------------------------------------------------------------


class Instant(asyncio.Protocol):
    """One connection. Answers by Content-Length alone; nothing else is looked at but the ids."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before, self._after = before, after
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = int(re.search(rb"(?i)content-length: (\d+)", self._data)[1])  # type: ignore[index]
            if len(self._data) < end + 4 + length:
                return
            body = bytes(self._data[end + 4 : end + 4 + length])
            del self._data[: end + 4 + length]
            found = _RIDS.search(body)
            rids = [rid.strip(b'"') for rid in found[1].split(b",")] if found else []
            parts = [p for rid in rids for p in (b",", self._before, rid, self._after)]
            answer = b"[" + b"".join(parts[1:]) + b"]"
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(answer)
            )
            self._transport.write(answer)


def prepared(load: Load) -> tuple[bytes, bytes]:
    """One sequence's reply before and after its id."""
    rng = np.random.default_rng(0)
    tokens = [*rng.integers(10, VOCAB, load.response - 1).tolist(), EOS]
    values = (-rng.exponential(size=load.response)).tolist()
    meta = {
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": PROMPT,
        "completion_tokens": load.response,
        "cached_tokens": 0,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": load.response}],
        "output_token_logprobs": [[v, t, None] for v, t in zip(values, tokens, strict=True)],
    }
    if load.experts:
        rows = rng.random((PROMPT + load.response - 1, LAYERS, load.experts), np.float32)
        ids = rows.argpartition(TOP_K, axis=-1)[..., :TOP_K].astype("<i4")
        meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
    text = json.dumps({"output_ids": tokens, "meta_info": {"id": "*", **meta}})
    before, _, after = text.partition('"*"')
    return (before + '"').encode(), ('"' + after).encode()


def serve(load: Load, cores: set[int], ready: Any) -> None:
    os.sched_setaffinity(0, cores)
    before, after = prepared(load)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Instant(before, after), "127.0.0.1", 0)
        ready.send((server.sockets[0].getsockname()[1], len(before) + len(after)))
        await server.serve_forever()

    asyncio.run(run())


# --- the trainer ----------------------------------------------------------------------------------


def write_folder(folder: Path) -> None:
    """A byte-level BPE tokenizer, as most models have, and a key."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    words = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(words, VOCAB, special_tokens=["<pad>", "<eos>"])
    missing = [f"<extra_{i}>" for i in range(VOCAB - bpe.get_vocab_size())]
    bpe.add_tokens(missing)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>")
    made.save_pretrained(folder)
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_text("key")


class Run:
    """A collector on one core, a server on the others, and as much asked for as is in flight."""

    def __init__(self, load: Load, folder: Path, core: int) -> None:
        self.load = load
        others = os.sched_getaffinity(0) - {core} or {core}
        os.sched_setaffinity(0, others)
        ours, theirs = multiprocessing.Pipe()
        self.server = multiprocessing.get_context("fork").Process(
            target=serve, args=(load, others, theirs), daemon=True
        )
        self.server.start()
        port, self.bytes_of_a_sample = ours.recv()
        self.collector = Collector(
            CollectorSettings(
                hf=folder,
                eos_ids=(EOS,),
                reward="exact_match",
                key_file=folder / "key",
                log_file=folder / "collector.log",
                max_in_flight=load.in_flight,
                routing=load.routing,
            )
        )
        self.collector.serve_from([Member("server 0", f"http://127.0.0.1:{port}", "1")])
        self.serial = self.done = 0
        self.prompt = Prompt("p", tuple(range(10, 10 + PROMPT)), {"answer": "8"})
        self.collector.recall()  # it is ready; all threads of it and of its rewards on the core
        self.processes = family(self.collector.pid)
        for pid in self.processes:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
        self.collector.resume()

    def for_seconds(self, seconds: float) -> dict[str, float]:
        groups = 2 * self.load.in_flight // GROUP
        self._issue(groups - (self.serial - self.done))
        self._take()  # warm
        start, cpu, before = time.monotonic(), self._cpu_s(), self.done
        while (spent := time.monotonic() - start) < seconds:
            self._take()
        samples = (self.done - before) * GROUP
        return {
            "samples": samples,
            "seconds": spent,
            "cpu_seconds": self._cpu_s() - cpu,
        }

    def _take(self) -> None:
        self.collector.wait(8, 60.0)
        outcomes = self.collector.take()
        bad = [o.failed for o in outcomes if len(o.samples) != GROUP]
        assert outcomes and not bad, bad[:1]
        self.done += len(outcomes)
        self._issue(len(outcomes))

    def _issue(self, count: int) -> None:
        sampling = Sampling(1.0, self.load.response)
        self.collector.issue(
            [
                GroupRequest(self.serial + i, 1, self.prompt, tuple(range(GROUP)), sampling)
                for i in range(count)
            ]
        )
        self.serial += count

    def _cpu_s(self) -> float:
        stats = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2] for p in self.processes]
        ticks = [int(ticks) for stat in stats for ticks in stat.split()[11:13]]
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.collector.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def close(self) -> None:
        self.collector.close()
        self.server.kill()
        self.server.join()


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {
        int(path.parent.name): int(path.read_text().rpartition(")")[2].split()[1])
        for path in Path("/proc").glob("[0-9]*/stat")
    }
    found = [pid]
    for of in found:
        found += [child for child, parent in parents.items() if parent == of]
    return found


def measure(load: Load, folder: Path, core: int, seconds: float) -> dict[str, Any]:
    run = Run(load, folder, core)
    try:
        run.for_seconds(min(1.0, seconds))
        found = run.for_seconds(seconds)
    finally:
        run.close()
    per_second = found["samples"] / found["seconds"]
    per_cpu_second = found["samples"] / found["cpu_seconds"]
    megabytes = run.bytes_of_a_sample / 1e6
    return {
        "experts": load.experts,
        "response_tokens": load.response,
        "sequences_in_flight": load.in_flight,
        "samples_per_second": round(per_second),
        "samples_per_cpu_second": round(per_cpu_second),
        "mb_per_second": round(per_second * megabytes, 1),
        "mb_per_cpu_second": round(per_cpu_second * megabytes, 1),
        "mb_of_a_sample": round(megabytes, 4),
        **found,
    }


def memory(load: Load, folder: Path, core: int, seconds: float) -> dict[str, Any]:
    run = Run(load, folder, core)
    try:
        run.for_seconds(min(3.0, seconds))  # buffers have their size
        resident = [run.resident_mb()]
        for _ in range(2):
            run.for_seconds(seconds / 2)
            resident.append(run.resident_mb())
    finally:
        run.close()
    return {"seconds": seconds, "resident_mb": [round(mb, 1) for mb in resident]}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--memory-seconds", type=float, default=60.0, help="0: not at all")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=("small", "routing", "memory"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {"core": given.core}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder)
        if given.only in (None, "small"):
            found["small"] = measure(SMALL, folder, given.core, given.seconds)
        if given.only in (None, "routing"):
            found["routing"] = [measure(r, folder, given.core, given.seconds) for r in ROUTING]
        if given.only in (None, "memory") and given.memory_seconds:
            load = replace(ROUTING[1], in_flight=64)
            found["memory"] = memory(load, folder, given.core, given.memory_seconds)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
