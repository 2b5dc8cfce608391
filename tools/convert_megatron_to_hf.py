#!/usr/bin/env python3
"""Turn a Megatron checkpoint (of a run, or of convert_hf_to_megatron.py) into a Hugging Face
folder::

python tools/convert_megatron_to_hf.py runs/demo/rl/checkpoints/step_60 runs/demo/hf_after
torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py CHECKPOINT OUT    # in 8 processes

No model is built: memory holds one parameter of one layer, one expert at a time. OUT appears when
it is whole. docs/conversion.md has more.
"""

import argparse
import sys
from pathlib import Path

from megarl.convert import Export, add_arguments, perform
from megarl.convert_display import show_mapping
from megarl.errors import MegarlError


def convert(source: Path, out: Path, threads: int = 1, timeout_s: float = 60.0) -> None:
    perform(Export(source), out, threads, timeout_s)
    print(f"{out}: from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="checkpoint folder, such as RUN/checkpoints/step_60"
    )
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    add_arguments(parser)
    args = parser.parse_args()
    try:
        if args.dry_run:
            show_mapping(Export(args.source).mapping)
            return 0
        convert(args.source, args.out, args.threads, args.timeout_s)
    except MegarlError as e:
        print(f"convert_megatron_to_hf: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
