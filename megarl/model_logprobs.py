"""Log-probs of a sequence by one of two implementations that share no code of a model::

    python -m megarl.model_logprobs megatron WEIGHTS HF TOKEN...
    python -m megarl.model_logprobs transformers HF TOKEN...

WEIGHTS is a distributed checkpoint of the model that HF's config.json describes. Prints a JSON list
of L - 1 numbers, computed in float32. Each has a process of its own: Megatron's support for CPUs
changes torch, and with it how transformers builds models.
"""

import argparse
import json
import sys
from pathlib import Path

from megarl.errors import MegarlError


def by_megatron(weights: Path, hf: Path, tokens: list[int]) -> list[float]:
    from megarl.actor.whole_model import whole_model_logprobs
    from megarl.models.spec import read_spec

    return whole_model_logprobs(weights, read_spec(hf), tokens).tolist()


def by_transformers(hf: Path, tokens: list[int]) -> list[float]:
    import numpy as np

    from megarl.rollout.embedded_model import SlotModel

    model = SlotModel(hf, num_slots=1, context_length=len(tokens), dtype="fp32", fixed_shape=False)
    logits, _ = model.forward_chunk(np.array(tokens), 0, 0, all_logits=True)
    every = logits[:-1].double().log_softmax(-1).cpu()
    return [float(row[token]) for row, token in zip(every, tokens[1:], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    megatron = kinds.add_parser("megatron")
    megatron.add_argument("weights", type=Path)
    for kind in (megatron, kinds.add_parser("transformers")):
        kind.add_argument("hf", type=Path)
        kind.add_argument("tokens", type=int, nargs="+")
    args = parser.parse_args()
    try:
        if args.kind == "megatron":
            found = by_megatron(args.weights, args.hf, args.tokens)
        else:
            found = by_transformers(args.hf, args.tokens)
    except MegarlError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
