#!/usr/bin/env python3
"""Turn a Megatron checkpoint (of a run, or of convert_hf_to_megatron.py) into a Hugging Face
folder::

python tools/convert_megatron_to_hf.py runs/demo/rl/checkpoints/step_60 runs/demo/hf_after
"""

import argparse
import sys
from pathlib import Path

import torch

from megarl.actor.export import MegatronWeights
from megarl.actor.model import build_model
from megarl.actor.setup import destroy_parallel, init_parallel
from megarl.actor.state import load_model
from megarl.checkpoint.manager import HF, MEGATRON, MODEL, read_json
from megarl.errors import MegarlError
from megarl.mesh import Mesh
from megarl.models.hf_io import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec


def convert(source: Path, out: Path) -> None:
    spec = ModelSpec.from_json(read_json(source / MODEL))
    parallel = init_parallel(Mesh(), seed=0, timeout_s=600)
    try:
        model = build_model(spec, parallel, getattr(torch, spec.dtype))
        load_model(model, parallel, source / MEGATRON)
        write_checkpoint(
            out,
            MegatronWeights(model, spec, parallel).tensors(),
            mapping_for(spec).hf_spec(),
            metadata_from=source / HF,
        )
    finally:
        destroy_parallel()
    print(f"{out}: from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="checkpoint folder, such as RUN/checkpoints/step_60"
    )
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    args = parser.parse_args()
    try:
        convert(args.source, args.out)
    except MegarlError as e:
        print(f"convert_megatron_to_hf: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
