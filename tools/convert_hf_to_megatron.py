#!/usr/bin/env python3
"""Turn a Hugging Face folder into a Megatron checkpoint that ``model.load`` reads, in any layout::

python tools/convert_hf_to_megatron.py runs/demo/model runs/demo/model_megatron

No model is built: memory holds one parameter of one layer, one expert at a time. ``--verify``
reads the checkpoint back before it is published, and compares digests of all tensors and, where
twice the weights fit into memory, log-probs.
"""

import argparse
import sys
from pathlib import Path

from megarl.checkpoint.manager import MEGATRON, publish_model
from megarl.checkpoint.streamed import write_weights
from megarl.checkpoint.verify import compare_logprobs, stored_digests, verify_import
from megarl.errors import MegarlError
from megarl.models.hf_complete import open_model
from megarl.models.spec import read_spec


def convert(source: Path, out: Path, *, verify: bool = False) -> None:
    spec = read_spec(source)
    checkpoint = open_model(source, spec)

    def check(part: Path) -> None:
        print(verify_import(part, spec, stored_digests(part)))
        print(compare_logprobs(part / MEGATRON, source, spec))

    publish_model(
        out,
        spec.as_json(),
        source,
        lambda folder: write_weights(folder, checkpoint, spec),
        check if verify else None,
    )
    print(f"{out}: {len(checkpoint.names())} tensors from {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder")
    parser.add_argument("out", type=Path, help="checkpoint folder, must not exist")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare")
    args = parser.parse_args()
    try:
        convert(args.source, args.out, verify=args.verify)
    except MegarlError as e:
        print(f"convert_hf_to_megatron: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
