#!/usr/bin/env python3
"""Turn a Megatron checkpoint (of a run, or of convert_hf_to_megatron.py) into a Hugging Face
folder::

python tools/convert_megatron_to_hf.py runs/demo/rl/checkpoints/step_60 runs/demo/hf_after
torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py CHECKPOINT OUT    # in 8 processes

No model is built: memory holds one parameter of one layer, one expert at a time. OUT appears when
it is whole. ``--fp8`` writes the linears in blocks of 128 x 128. docs/conversion.md has more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.convert import Export, add_arguments, launched, perform, tool
from megarl.convert_display import show_fp8, show_mapping
from megarl.models.fp8_export import SCALES


def convert(
    source: Path,
    out: Path,
    fp8: str | None = None,
    exclude: Sequence[str] = (),
    threads: int = 1,
    timeout_s: float = 60.0,
    *,
    verify: bool = False,
) -> None:
    perform(Export(source, fp8, exclude, verify=verify), out, threads, timeout_s)
    if launched()[0] == 0:
        print(f"{out}: from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    step = "checkpoint folder, such as RUN/checkpoints/step_60"
    parser.add_argument("source", type=Path, help=step)
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    scales = "in FP8: f32 or power_of_two scales"
    parser.add_argument("--fp8", choices=list(SCALES), metavar="SCALES", help=scales)
    plain = "modules that stay plain, such as model.layers.0 or self_attn.kv_b_proj"
    parser.add_argument("--fp8-exclude", nargs="+", default=[], metavar="MODULE", help=plain)
    back = "read what was written back, and compare, before it appears"
    parser.add_argument("--verify", action="store_true", help=back)
    add_arguments(parser)
    args = parser.parse_args()
    if args.fp8_exclude and not args.fp8:
        parser.error("--fp8-exclude has no effect without --fp8")
    if args.dry_run and args.verify:
        parser.error("--verify has no effect with --dry-run: nothing is written")
    fp8 = args.fp8, args.fp8_exclude

    def work() -> None:
        rank, processes = launched()
        if args.dry_run:
            export = Export(args.source, *fp8)
            if rank == 0:
                show_mapping(export.mapping, processes)
            if rank == 0 and export.fp8 is not None:
                show_fp8(export.fp8)
        else:
            shared = args.threads, args.timeout_s
            convert(args.source, args.out, *fp8, *shared, verify=args.verify)

    return tool("convert_megatron_to_hf", work)


if __name__ == "__main__":
    sys.exit(main())
