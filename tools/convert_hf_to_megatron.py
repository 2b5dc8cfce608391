#!/usr/bin/env python3
"""Turn a Hugging Face folder into a Megatron checkpoint of weights, which any layout loads::

python tools/convert_hf_to_megatron.py runs/demo/model runs/demo/model_megatron
torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py MODEL OUT    # in 8 processes

No model is built: memory holds one parameter of one layer, one expert at a time. OUT appears when
it is whole. docs/conversion.md has more.
"""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from megarl.convert import Import, add_arguments, launched, perform, tool
from megarl.convert_display import show_mapping


def convert(
    source: Path,
    out: Path,
    allow_missing: Collection[str] = (),
    threads: int = 1,
    timeout_s: float = 60.0,
    *,
    verify: bool = False,
) -> None:
    conversion = Import(source, allow_missing, verify=verify)
    perform(conversion, out, threads, timeout_s)
    if launched()[0] == 0:
        print(f"{out}: {len(conversion.checkpoint.names())} tensors from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder")
    parser.add_argument("out", type=Path, help="checkpoint folder, must not exist")
    lack = "tensors that the folder may lack: they become zeros"
    parser.add_argument("--allow-missing", nargs="+", default=[], metavar="NAME", help=lack)
    back = "read what was written back, and compare, before it appears"
    parser.add_argument("--verify", action="store_true", help=back)
    add_arguments(parser)
    args = parser.parse_args()
    if args.dry_run and args.verify:
        parser.error("--verify has no effect with --dry-run: nothing is written")

    def work() -> None:
        rank, processes = launched()
        if args.dry_run:
            conversion = Import(args.source, args.allow_missing)
            if rank == 0:
                show_mapping(conversion.mapping, processes)
        else:
            shared = args.threads, args.timeout_s
            convert(args.source, args.out, args.allow_missing, *shared, verify=args.verify)

    return tool("convert_hf_to_megatron", work)


if __name__ == "__main__":
    sys.exit(main())
