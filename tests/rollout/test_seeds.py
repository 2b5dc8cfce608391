"""Seeds: what decides draws, and nothing else does."""

from megarl.rollout.seeds import sample_seeds
from megarl.types import Prompt

PROMPTS = [Prompt(f"p{i}", (3 + i,), {}) for i in range(12)]


def test_seeds_never_repeat_in_a_step_whoever_samples_a_prompt_again() -> None:
    """Other collectors' prompts and those of earlier rounds come before; alone, nothing changes."""
    whole = sample_seeds(5, 3, [*PROMPTS, *PROMPTS[:3], PROMPTS[0]], 4)
    assert len({seed for group in whole for seed in group}) == 16 * 4
    parts = [PROMPTS, PROMPTS[:3], PROMPTS[:1]]
    earlier: list[Prompt] = []
    again = []
    for part in parts:
        again += sample_seeds(5, 3, part, 4, earlier)
        earlier += part
    assert again == whole
    assert sample_seeds(5, 3, PROMPTS, 4, []) == whole[:12]
    assert sample_seeds(5, 3, PROMPTS[6:], 4, PROMPTS[:6]) == whole[6:12]


def test_seeds_never_repeat_in_a_step_even_for_a_prompt_that_does() -> None:
    twice = [*PROMPTS, PROMPTS[0]]
    seeds = [seed for group in sample_seeds(5, 3, twice, 4) for seed in group]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seeds(5, 3, PROMPTS[:1], 4) == sample_seeds(5, 3, twice, 4)[:1]
    assert sample_seeds(5, 4, PROMPTS, 4) != sample_seeds(5, 3, PROMPTS, 4)
