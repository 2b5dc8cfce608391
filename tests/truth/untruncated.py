"""Whether a server samples from the whole distribution of its model, and from no sharper one."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megarl.types import Sample, Sampling
from tests.helpers.dist import WorkerPool
from tests.truth.served import Address, Question, completions

PROMPT, EOS = [3, 9, 14, 2], 1
# What makers of models recommend in generation_config.json, and servers may take for a default.
RECOMMENDED = {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 5}


def recommend(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | RECOMMENDED))


def next_probabilities(
    pool: WorkerPool, folder: Path, vocab: int, temperature: float
) -> NDArray[np.float64]:
    """[vocab] after PROMPT, as the actor has them in fp32."""
    every = [_with_next(token, index) for index, token in enumerate(range(vocab))]
    question = Question(folder, every, "fp32", temperature, False)
    (found,) = pool.run("tests.truth.work:logprobs", world=1, questions=[question], layout={})
    return np.array([np.exp(float(found[0][i][-1])) for i in range(vocab)])


def truncated(probabilities: NDArray[np.float64], temperature: float) -> set[int]:
    """The tokens that RECOMMENDED leaves of a distribution at ``temperature``."""
    sharp = probabilities ** (temperature / RECOMMENDED["temperature"])
    order = np.argsort(-sharp)
    before = np.cumsum(sharp[order]) / sharp.sum() - sharp[order] / sharp.sum()
    kept = order[(before < RECOMMENDED["top_p"]) & (np.arange(len(order)) < RECOMMENDED["top_k"])]
    return set(kept.tolist())


def check(
    server: Address, probabilities: NDArray[np.float64], temperature: float, draws: int
) -> None:
    """Frequencies by Pearson's chi-square over tokens expected five times or more, the others
    together; five standard deviations of it above its mean. Log-probs are of those probabilities.
    An end token stops a response, also where it is the last that the limit allows.
    """
    parts = completions(server, [PROMPT] * draws, Sampling(temperature, 1), seed=1000)
    tokens = np.array([part.token_ids[0] for part in parts])
    said = np.array([part.logprobs[0] for part in parts])
    np.testing.assert_allclose(said, np.log(probabilities[tokens]), atol=2e-5, rtol=0)
    ended = [part.finish == "stop" for part in parts]
    assert ended == (tokens == EOS).tolist() and any(ended)
    expected = probabilities * draws
    counts = np.bincount(tokens, minlength=len(expected))
    often = expected >= 5
    freedom = int(often.sum())
    assert freedom > 5  # else the statistic means little
    pairs = [*zip(counts[often], expected[often], strict=True)]
    if rest := expected[~often].sum():
        pairs.append((counts[~often].sum(), rest))
    squared = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert squared < freedom + 5 * np.sqrt(2 * freedom)
    left = truncated(probabilities, temperature)
    others = sum(token not in left for token in tokens.tolist())
    assert others > 0.2 * draws, (left, others)  # none, were it truncated


def _with_next(token: int, index: int) -> Sample:
    tokens = np.array([*PROMPT, token], np.int32)
    mask = np.arange(len(tokens)) >= len(PROMPT)
    return Sample(
        prompt_id="p",
        group=0,
        index=index,
        tokens=tokens,
        mask=mask,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        rewards=np.zeros(1, np.float32),
        correct=False,
        truncated=True,
    )
