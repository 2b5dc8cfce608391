#!/usr/bin/env python3
"""How fast conversion is, and how much memory it takes, beside a plain copy of the same bytes on
the same disk and beside an implementation that loads the whole model::

    python tools/bench_convert.py --json convert.json           # 4.3 GB, generated
    python tools/bench_convert.py --gigabytes 1 --rounds 2      # smaller

What is timed is written to disk: a copy, too, ends with fsync. All take turns, each in a process of
its own and with nothing of its output in memory; a ratio is that of the best of the rounds.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.rundir import sync_path  # noqa: E402

EXPERTS, HIDDEN, MOE_FFN = 32, 2048, 1024
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "moe_intermediate_size": MOE_FFN,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def generate(folder: Path, gigabytes: float) -> None:
    """A mixture of experts of at least so much, of random bits."""
    import torch

    from megarl.models.hf_write import write_checkpoint
    from megarl.models.mapping import mapping_for
    from megarl.models.spec import read_spec

    a_layer = 2 * (EXPERTS * 3 * HIDDEN * MOE_FFN + 2 * HIDDEN * (2048 + 512))
    layers = math.ceil((gigabytes * 1e9 - 4 * 32000 * HIDDEN) / a_layer)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    specs = mapping_for(read_spec(folder)).hf_spec()
    random = torch.randn(HIDDEN * 32000 + 97).bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for k, spec in enumerate(specs):
            size = math.prod(spec.shape)
            yield spec.name, random[k % 97 :][:size].view(spec.shape)

    write_checkpoint(folder / "model", tensors(), specs, folder)


# ---- what is timed, each in its own process


def copy(source: Path, out: Path, threads: int) -> None:
    out.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, out / file.name)
        sync_path(out / file.name)


def imported(source: Path, out: Path, threads: int) -> None:
    from megarl.convert import Import, perform

    perform(Import(source), out, threads, 60)


def exported(source: Path, out: Path, threads: int) -> None:
    from megarl.convert import Export, perform

    perform(Export(source), out, threads, 60)


def eager_import(source: Path, out: Path, threads: int) -> None:
    """All tensors at once, mapped, and saved by torch's own writer."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    from megarl.models.sharded import megatron_mapping, parameter_names
    from megarl.models.spec import read_spec

    mapping = megatron_mapping(read_spec(source))
    tensors = {k: v for f in sorted(source.glob("*.safetensors")) for k, v in load_file(f).items()}
    state = {
        name: mapping.to_megatron(name, [tensors[hf] for hf in mapping.hf_names(name)])
        for name in parameter_names(mapping)
    }
    dcp.save(state, checkpoint_id=out, no_dist=True)
    for file in out.iterdir():
        sync_path(file)


def eager_export(source: Path, out: Path, threads: int) -> None:
    """The same checkpoint back, from what ``eager_import`` made."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from megarl.models.sharded import megatron_mapping, parameter_names
    from megarl.models.spec import read_spec

    mapping = megatron_mapping(read_spec(source.parent / "source" / "model"))
    names = parameter_names(mapping)
    state = {name: torch.empty(mapping.shape(name), dtype=torch.bfloat16) for name in names}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    tensors = {hf: t for name in names for hf, t in mapping.to_hf(name, [state[name]])}
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    sync_path(out / "model.safetensors")


WORK: dict[str, tuple[Callable[[Path, Path, int], None], str]] = {  # and what it reads
    "copy": (copy, "source/model"),
    "import": (imported, "source/model"),
    "eager_import": (eager_import, "source/model"),
    "copy_back": (copy, "import/megatron"),
    "export": (exported, "import"),
    "eager_export": (eager_export, "eager_import"),
}


def measured(name: str, source: Path, out: Path, threads: int) -> dict[str, float]:
    """Seconds, and bytes of memory beyond those at the start, of this process."""
    import torch

    import megarl.convert  # noqa: F401  what is imported is not timed

    torch.empty(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before, begin = status("VmRSS"), time.monotonic()
    WORK[name][0](source, out, threads)
    return {"seconds": time.monotonic() - begin, "peak_bytes": status("VmHWM") - before}


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def forget(folder: Path) -> None:
    """Drop the files' pages: the next round reads from the disk, as the first did."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


# ---- rounds


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    generate(folder / "source", args.gigabytes)
    best: dict[str, dict[str, float]] = {}
    for number in range(args.rounds):
        for name, (_, source) in WORK.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            forget(folder / source)
            found = in_a_process(name, folder / source, folder / name, args.threads)
            print(f"round {number + 1} {name}: {found['seconds']:.1f} s", flush=True)
            before = best.get(name, found)
            best[name] = {
                "seconds": min(before["seconds"], found["seconds"]),
                "peak_bytes": max(before["peak_bytes"], found["peak_bytes"]),
            }
    return results(folder, best)


def in_a_process(name: str, source: Path, out: Path, threads: int) -> dict[str, float]:
    """What ``measured`` says, in the last line: before it is what a conversion says."""
    command = [sys.executable, __file__, "--work", name, source, out, "--threads", threads]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def results(folder: Path, best: dict[str, dict[str, float]]) -> dict[str, Any]:
    from megarl.checkpoint.streamed import items_of, places_of
    from megarl.models.sharded import megatron_mapping
    from megarl.models.spec import read_spec

    items = items_of(places_of(megatron_mapping(read_spec(folder / "source" / "model"))))
    seconds = {name: found["seconds"] for name, found in best.items()}
    peaks = {name: found["peak_bytes"] for name, found in best.items()}
    return {
        "bytes": sum(item.num_bytes for item in items),
        "largest_group_bytes": max(item.num_bytes for item in items),
        "peak_bytes": max(peaks["import"], peaks["export"]),
        "import_vs_copy": seconds["copy"] / seconds["import"],
        "export_vs_copy": seconds["copy_back"] / seconds["export"],
        "import_vs_eager": seconds["eager_import"] / seconds["import"],
        "export_vs_eager": seconds["eager_export"] / seconds["export"],
        "seconds": seconds,
        "peaks": peaks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="of which disk; default the system's")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, source, out = args.work
        print(json.dumps(measured(name, Path(source), Path(out), args.threads)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=args.folder) as folder:
        found = run(Path(folder), args)
    for name, seconds in found["seconds"].items():
        rate, peak = found["bytes"] / seconds / 1e6, found["peaks"][name] / 1e6
        print(f"{name:14} {seconds:7.1f} s {rate:7.0f} MB/s   peak memory {peak:7.0f} MB")
    print(f"largest group  {found['largest_group_bytes'] / 1e6:.0f} MB")
    for name in ("import_vs_copy", "export_vs_copy", "import_vs_eager", "export_vs_eager"):
        print(f"{name:16} {found[name]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
