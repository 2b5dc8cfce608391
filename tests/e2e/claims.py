"""Whether tokens were sampled by the weights that their version spans claim::

    python -m tests.e2e.claims RUN HF [ROLLOUTS]

RUN recorded its rollouts and has a checkpoint of every step; HF has the weights it began with.
Prints a JSON list of what is false: [step, sample, version, largest difference of a log-prob].
Log-probs are transformers', so this needs a process without Megatron.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

# fp32, sums in another order: of 986 spans the worst was 1.5e-6. Had each claimed the next version,
# the least of what is seen of it would have been 5e-4.
TOLERANCE = 2e-5


def false_claims(run: Path, hf: Path, rollouts: Path | None = None) -> list[Any]:
    """``rollouts``: others than the run's own."""
    folder = rollouts or run / "rollouts"
    command = [sys.executable, "-m", "tests.e2e.claims", str(run), str(hf), str(folder)]
    told = subprocess.run(command, check=True, timeout=600, stdout=subprocess.PIPE, cwd=ROOT)
    return list(json.loads(told.stdout.splitlines()[-1]))


def logprobs_of(folder: Path, sequences: Sequence[Sequence[int]]) -> Any:
    """[S, L - 1], padded: natural, fp32, of every token but the first given those before it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()
    longest = max(map(len, sequences))
    padded = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])  # at the end
    with torch.no_grad():
        logits = model(padded).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, padded[:, 1:, None]).squeeze(-1).numpy()


def main(run: Path, hf: Path, rollouts: Path) -> None:
    import numpy as np

    from megarl.convert import Export, perform
    from megarl.data.recorded import read_samples, recorded_steps

    claimed: dict[int, list[Any]] = defaultdict(list)  # by version
    for step, path in recorded_steps(rollouts):
        for sample in read_samples(path):
            ends = [0, *(span.end for span in sample.version_spans)]
            prompt = sample.length - ends[-1]
            assert [span.start for span in sample.version_spans] == ends[:-1], sample.name
            assert prompt > 0 and sample.mask.tolist() == [
                i >= prompt for i in range(sample.length)
            ]
            for span in sample.version_spans:
                claimed[span.version].append((step, sample, prompt + span.start, prompt + span.end))
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for version, claims in sorted(claimed.items()):
            folder = hf
            if version:
                folder = Path(scratch) / f"version_{version}"
                perform(Export(run / f"checkpoints/step_{version}"), folder, 1, 60.0)
            every = logprobs_of(folder, [sample.tokens.tolist() for _, sample, _, _ in claims])
            for (step, sample, start, end), logprobs in zip(claims, every, strict=True):
                apart = np.abs(sample.rollout_logprobs[start:end] - logprobs[start - 1 : end - 1])
                if not apart.max() < TOLERANCE:
                    found.append([step, sample.name, version, float(apart.max())])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
