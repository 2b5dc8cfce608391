#!/usr/bin/env python3
"""Turn a Megatron checkpoint (of a run, or of convert_hf_to_megatron.py) into a Hugging Face
folder::

python tools/convert_megatron_to_hf.py runs/demo/rl/checkpoints/step_60 runs/demo/hf_after

No model is built: memory holds one parameter of one layer, one expert at a time. ``--fp8`` writes
the linears in blocks of 128 x 128 (docs/fp8-folders.md).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.checkpoint.manager import HF, MEGATRON, MODEL
from megarl.checkpoint.models import (
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.checkpoint.streamed import export_weights
from megarl.errors import MegarlError
from megarl.models.fp8_export import SCALES, fp8_export
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec


def convert(source: Path, out: Path, fp8: str | None = None, exclude: Sequence[str] = ()) -> None:
    spec = stored_spec(source / MODEL)
    meant = read_spec(source / HF)
    require_no_contradictions(config_contradictions(source / MODEL, meant, source / HF))
    export = fp8_export(mapping_for(spec), fp8, exclude) if fp8 else None
    export_weights(source / MEGATRON, out, spec, metadata_from=source / HF, fp8=export)
    print(f"{out}: from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="checkpoint folder, such as RUN/checkpoints/step_60"
    )
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    parser.add_argument(
        "--fp8", choices=list(SCALES), metavar="SCALES", help="in FP8: f32 or power_of_two scales"
    )
    parser.add_argument(
        "--fp8-exclude",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules that stay plain, such as model.layers.0 or self_attn.kv_b_proj",
    )
    args = parser.parse_args()
    if args.fp8_exclude and not args.fp8:
        parser.error("--fp8-exclude has no effect without --fp8")
    try:
        convert(args.source, args.out, args.fp8, args.fp8_exclude)
    except MegarlError as e:
        print(f"convert_megatron_to_hf: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
