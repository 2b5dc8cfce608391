#!/usr/bin/env python3
"""Turn a Megatron checkpoint (of a run, or of convert_hf_to_megatron.py) into a Hugging Face
folder::

python tools/convert_megatron_to_hf.py runs/demo/rl/checkpoints/step_60 runs/demo/hf_after

No model is built: memory holds one parameter of one layer, one expert at a time. Says whether the
weights are those that were once imported, by their digests. ``--verify`` reads the folder back
before it is published, and compares digests of all parameters and, where twice the weights fit into
memory, log-probs.
"""

import argparse
import sys
from pathlib import Path

from megarl.checkpoint.manager import HF, MEGATRON, MODEL
from megarl.checkpoint.models import (
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.checkpoint.streamed import export_weights
from megarl.checkpoint.verify import compare_logprobs, compare_with_import, verify_export
from megarl.errors import MegarlError
from megarl.models.spec import read_spec


def convert(source: Path, out: Path, *, verify: bool = False) -> None:
    spec = stored_spec(source / MODEL)
    meant = read_spec(source / HF)
    require_no_contradictions(config_contradictions(source / MODEL, meant, source / HF))

    def check(part: Path) -> None:
        print(verify_export(source / MEGATRON, part, spec))
        print(compare_logprobs(source / MEGATRON, part, spec))

    weights, hf = source / MEGATRON, source / HF
    exported = export_weights(
        weights, out, spec, metadata_from=hf, verify=check if verify else None
    )
    print(f"{out}: from {source}; {compare_with_import(source, exported)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="checkpoint folder, such as RUN/checkpoints/step_60"
    )
    parser.add_argument("out", type=Path, help="Hugging Face folder, must not exist")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare")
    args = parser.parse_args()
    try:
        convert(args.source, args.out, verify=args.verify)
    except MegarlError as e:
        print(f"convert_megatron_to_hf: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
