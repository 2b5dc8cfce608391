"""Made-up rollouts with the shapes of real ones."""

import numpy as np

from megarl.types import Sample


def random_samples(
    groups: int, per_group: int, *, vocab: int = 24, seed: int = 0, longest: int = 24
) -> list[Sample]:
    """Ragged samples of 3 to ``longest`` tokens; some groups have equal rewards, some samples a
    hole in the mask.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = int(rng.integers(2, 8))
        for index in range(per_group):
            length = prompt + int(rng.integers(1, longest - prompt))
            mask = np.arange(length) >= prompt
            if index == 1 and length > prompt + 3:
                mask[prompt + 1] = False  # as a tool's answer would be
            reward = float(rng.integers(0, 2)) if group % 4 else 1.0
            samples.append(
                Sample(
                    prompt_id=f"p{group}",
                    group=group,
                    index=index,
                    # not 0: the padding token's embedding is 0, where a norm's gradient is 1e3
                    tokens=rng.integers(1, vocab, length).astype(np.int32),
                    mask=mask,
                    rollout_logprobs=np.where(mask, -rng.random(length) * 3, 0).astype(np.float32),
                    rewards=np.array([reward], np.float32),
                    correct=reward > 0,
                    truncated=False,
                )
            )
    return samples
