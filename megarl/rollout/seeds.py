"""Seeds of samples: a hash of (run seed, step, prompt id, index), and nothing else decides draws.

A prompt that occurs twice in a step, wherever it is sampled, goes on counting, so that no two
samples share a seed.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

from megarl.types import Prompt


def sample_seeds(
    run_seed: int,
    step: int,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    earlier: Sequence[Prompt] = (),
) -> list[list[int]]:
    """63-bit seeds of every prompt's samples; none that a prompt in ``earlier`` has."""
    seen = Counter(prompt.id for prompt in earlier)
    seeds = []
    for prompt in prompts:
        first = seen[prompt.id] * samples_per_prompt
        seen[prompt.id] += 1
        indices = range(first, first + samples_per_prompt)
        seeds.append([sample_seed(run_seed, step, prompt.id, index) for index in indices])
    return seeds


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The first 63 bits of sha256 over the four, as one JSON-like line."""
    line = f"{run_seed},{step},{index},{prompt_id}"
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:8], "big") >> 1
