"""Rewards: a function of the response's text and the prompt's payload, chosen by name.

A name is ``kind`` or ``kind:argument``, looked up in ``KINDS``. The text of a response comes from
the model and is data: nothing here evaluates it, and scorers of reasoning-gym that do are refused.

A function returns a number, or a ``Scored`` with the reward's parts. Here either becomes a
``Scored`` whose numbers are finite and whose ``correct`` is decided (``score``).
"""

import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from megarl.errors import ConfigError, DataError, Problem
from megarl.protocols import Reward
from megarl.types import OneOfKnown, Scored

END_OF_THOUGHT = "</think>"
KEY = "data.reward"
_LARGEST = float(np.finfo(np.float32).max)
FULL_MARKS = 1.0  # a reward of at least this counts as correct, where nothing else is said
WHOLE = "reward"  # the only component of a reward that is a plain number
UNSCORED = Scored({}, correct=False)  # a response that never ended: 0 in every component


def load_reward(name: str) -> Reward:
    """The function behind ``data.reward``. Raises ConfigError for names that lead nowhere."""
    kind, _, argument = name.partition(":")
    if kind not in KINDS:
        raise _unusable(name, "exact_match, reasoning_gym:DATASET, import:package.module:function")
    return KINDS[kind](argument)


def score(
    reward: Reward, text: str, payload: Mapping[str, Any], *, finished: bool, sample: str
) -> Scored:
    """Call a reward and take nothing but finite numbers from it.

    A number becomes one component, ``WHOLE``; ``correct`` is never None. A response that never
    ended is not scored (``UNSCORED``): a truncated answer may look right. ``sample`` names the
    response in errors. Raises DataError for None, NaN, dict, text, ... and for steps whose ends do
    not increase or lie outside the text.
    """
    if not finished:
        return UNSCORED
    try:
        value: object = reward(text, payload, finished)
    except Exception as e:
        raise DataError(f"the reward failed on sample {sample}: {type(e).__name__}: {e}") from e
    if not isinstance(value, Scored):
        value = Scored({WHOLE: _number(value, f"the reward of sample {sample}", " or a Scored")})
    components = _components(value.components, sample)
    correct = value.correct
    if correct is None:
        correct = math.fsum(components.values()) >= FULL_MARKS
    elif not isinstance(correct, bool | np.bool_):
        found = f"the reward of sample {sample} has correct = {correct!r:.80}"
        raise DataError(f"{found}; accepted: True, False or None")
    return Scored(components, bool(correct), _steps(value.steps, len(text), sample))


def _components(given: object, sample: str) -> dict[str, float]:
    whose = f"the reward of sample {sample}"
    if not isinstance(given, Mapping) or not given:
        raise DataError(
            f"{whose} has components = {given!r:.80}; accepted: a mapping of at least one name "
            "to its reward"
        )
    for name in given:
        if not isinstance(name, str) or not name:
            raise DataError(f"{whose} has a component named {name!r:.80}; accepted: some text")
    return {name: _number(v, f"component {name!r} of {whose}") for name, v in given.items()}


def _steps(given: object, length: int, sample: str) -> tuple[tuple[int, float], ...]:
    """(end, reward) of every step; ``length``: characters of the response's text."""
    whose, pairs = f"the reward of sample {sample}", "pairs (end in characters, reward)"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise DataError(f"{whose} has steps = {given!r:.80}; accepted: {pairs}")
    steps: list[tuple[int, float]] = []
    for i, step in enumerate(given):
        if not isinstance(step, tuple | list) or len(step) != 2:
            raise DataError(f"{whose} has steps[{i}] = {step!r:.80}; accepted: {pairs}")
        end, value = step
        first = steps[-1][0] + 1 if steps else 1
        if not isinstance(end, numbers.Integral) or not first <= int(end) <= length:
            accepted = f"whole numbers that increase, from {first} to the text's length, {length}"
            raise DataError(f"{whose} has steps[{i}] end at {end!r:.80}; accepted: {accepted}")
        steps.append((int(end), _number(value, f"the reward of steps[{i}] of sample {sample}")))
    return tuple(steps)


def _number(value: object, what: str, alternative: str = "") -> float:
    """Finite also in fp32, in which rewards are kept."""
    if not isinstance(value, numbers.Real) or not abs(float(value)) <= _LARGEST:
        shown = f"{type(value).__name__} {value!r:.80}"
        raise DataError(f"{what} is {shown}; accepted: a finite number{alternative}")
    return float(value)


def step_tokens(
    response: Sequence[int], ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Index in ``response`` of the token in which each step's last character lies.

    ``ends``: increasing ends of the steps, in characters of ``decode(response)``. A character made
    of several tokens lies in the last of them: before it the text is not yet the same.
    """
    text, last = decode(response), len(response) - 1
    found: list[int] = []
    for end in ends:
        low, high = found[-1] if found else 0, last  # the token sought lies in [low, high]
        while low < high:
            middle = (low + high) // 2
            if decode(response[: middle + 1]).startswith(text[:end]):
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return found


def pad_rewards(samples: Sequence[OneOfKnown], count: int) -> list[OneOfKnown]:
    """Samples that were not scored get ``count`` components of 0, as many as the others have."""
    assert all(len(s.rewards) == count or s.truncated for s in samples), count
    zeros = np.zeros(count, np.float32)
    return [s if len(s.rewards) == count else replace(s, rewards=zeros) for s in samples]


def extract_answer(text: str) -> str:
    """What follows the last ``</think>``, stripped; all of a text that has none."""
    return text.rpartition(END_OF_THOUGHT)[2].strip()


def exact_match(text: str, payload: Mapping[str, Any], finished: bool) -> float:
    """1 if the answer equals ``payload["answer"]``, both stripped."""
    if "answer" not in payload:
        raise DataError('exact_match needs the key "answer" in every line of data.prompts')
    return float(extract_answer(text) == str(payload["answer"]).strip())


def _exact_match(argument: str) -> Reward:
    if argument:
        raise _unusable(f"exact_match:{argument}", "exact_match takes no argument")
    return exact_match


def _reasoning_gym(dataset: str) -> Reward:
    """1 if the dataset's own scorer gives the answer full marks, else 0.

    Partial marks are dropped: many scorers give them for an answer that merely contains the right
    one ("14" for "4" is half right), which a policy learns to exploit.
    """
    import reasoning_gym

    name = f"reasoning_gym:{dataset}"
    if dataset not in reasoning_gym.factory.DATASETS:
        raise _unusable(name, "reasoning_gym: and the name of one of its datasets")
    kind, _ = reasoning_gym.factory.DATASETS[dataset]
    if _evaluates(kind.score_answer):
        raise _unusable(name, "a dataset whose scorer does not evaluate the answer as code")
    scorer = reasoning_gym.create_dataset(dataset, seed=0, size=1)

    def score_answer(text: str, payload: Mapping[str, Any], finished: bool) -> float:
        if "entry" not in payload:
            raise DataError(f'{name} needs the key "entry" (the dataset item) in every line')
        return float(scorer.score_answer(extract_answer(text), payload["entry"]) == 1.0)

    return score_answer


def _imported(path: str) -> Reward:
    module_name, _, function_name = path.partition(":")
    name = f"import:{path}"
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as e:
        raise _unusable(name, f"import:package.module:function ({e})") from e
    if not callable(function):
        raise _unusable(name, "the name of a function (text, payload, finished) -> float or Scored")
    return cast(Reward, function)


KINDS: dict[str, Callable[[str], Reward]] = {
    "exact_match": _exact_match,
    "reasoning_gym": _reasoning_gym,
    "import": _imported,
}


def _evaluates(function: Callable[..., object]) -> bool:
    """Whether a scorer's source calls eval, exec or sympy's parser, which is eval inside."""
    source = inspect.getsource(function)
    return any(call in source for call in ("eval(", "exec(", "parse_expr(", "sympify("))


def _unusable(found: str, accepted: str) -> ConfigError:
    return ConfigError([Problem(KEY, found, accepted)])
