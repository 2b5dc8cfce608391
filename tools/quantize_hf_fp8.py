#!/usr/bin/env python3
"""Write a Hugging Face folder anew with its linears in FP8 blocks of 128 x 128, as servers load
them (docs/fp8-folders.md)::

python tools/quantize_hf_fp8.py runs/demo/hf_after runs/demo/hf_fp8 --scales power_of_two

Memory holds one tensor at a time. OUT appears complete or not at all.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import DataError, MegarlError
from megarl.models.config_json import read_object
from megarl.models.fp8_export import SCALES, fp8_export
from megarl.models.hf_complete import check_complete, open_model
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_io import HfCheckpoint
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import read_spec


def quantize(source: Path, out: Path, scales: str, exclude: Sequence[str] = ()) -> None:
    spec = read_spec(source)
    mapping = mapping_for(spec)
    export = fp8_export(mapping, scales, exclude)
    checkpoint = open_model(source, spec)
    if read_object(source / "config.json").get(KEY) is not None:
        why = "codes of codes lose what the first scales kept; quantise the weights they came from"
        raise DataError(f"{source} is in FP8 already: {why}")
    check_complete(checkpoint, spec)
    tensors = export.quantised(_tensors(checkpoint, mapping))
    write_checkpoint(out, tensors, export.specs, source, quantization=export.config())
    print(f"{out}: {len(export.codes)} of {len(mapping.hf_spec())} tensors of {source} in FP8")


def _tensors(checkpoint: HfCheckpoint, mapping: ModelMapping) -> Iterator[tuple[str, Tensor]]:
    """In the dtypes of the model, repeated ones also where the folder lacks them."""
    there, copies = set(checkpoint.names()), mapping.copies()
    for spec in mapping.hf_spec():
        name = spec.name if spec.name in there else copies[spec.name]
        yield spec.name, checkpoint.get(name).to(getattr(torch, spec.dtype))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder in bf16 or fp32")
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    parser.add_argument("--scales", choices=list(SCALES), default="f32")
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules that stay plain, such as model.layers.0 or self_attn.kv_b_proj",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is left goes
    try:
        quantize(args.source, args.out, args.scales, args.exclude)
    except MegarlError as e:
        print(f"quantize_hf_fp8: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
