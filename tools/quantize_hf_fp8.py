#!/usr/bin/env python3
"""Write a Hugging Face folder anew with its linears in FP8 blocks of 128 x 128, as servers load
them (docs/fp8-folders.md)::

python tools/quantize_hf_fp8.py runs/demo/hf_after runs/demo/hf_fp8 --scales power_of_two
torchrun --nproc-per-node 8 tools/quantize_hf_fp8.py MODEL OUT    # in 8 processes

Memory holds one tensor at a time. OUT appears when it is whole.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.convert import Quantisation, add_arguments, launched, perform, tool
from megarl.convert_display import show_fp8
from megarl.models.fp8_export import SCALES


def quantize(
    source: Path,
    out: Path,
    scales: str,
    exclude: Sequence[str] = (),
    threads: int = 1,
    timeout_s: float = 60.0,
) -> None:
    work = Quantisation(source, scales, exclude)
    perform(work, out, threads, timeout_s)
    if launched()[0] == 0:
        print(f"{out}: {len(work.fp8.codes)} of {len(work.specs)} tensors of {source} in FP8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder in bf16 or fp32")
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    parser.add_argument("--scales", choices=list(SCALES), default="f32")
    plain = "modules that stay plain, such as model.layers.0 or self_attn.kv_b_proj"
    parser.add_argument("--exclude", nargs="+", default=[], metavar="MODULE", help=plain)
    add_arguments(parser)
    args = parser.parse_args()

    def work() -> None:
        fp8 = args.scales, args.exclude
        if args.dry_run:
            conversion = Quantisation(args.source, *fp8)
            if launched()[0] == 0:
                show_fp8(conversion.fp8)
        else:
            quantize(args.source, args.out, *fp8, args.threads, args.timeout_s)

    return tool("quantize_hf_fp8", work)


if __name__ == "__main__":
    sys.exit(main())
