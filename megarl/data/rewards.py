"""Rewards: a function of the response's text and the prompt's payload, chosen by name.

A name is ``kind`` or ``kind:argument``, looked up in ``KINDS``. The text of a response comes from
the model and is data: nothing here evaluates it, and scorers of reasoning-gym that do are refused.
"""

import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, cast

from megarl.errors import ConfigError, DataError, Problem
from megarl.protocols import Reward

END_OF_THOUGHT = "</think>"
KEY = "data.reward"


def load_reward(name: str) -> Reward:
    """The function behind ``data.reward``. Raises ConfigError for names that lead nowhere."""
    kind, _, argument = name.partition(":")
    if kind not in KINDS:
        raise _unusable(name, "exact_match, reasoning_gym:DATASET, import:package.module:function")
    return KINDS[kind](argument)


def score(
    reward: Reward, text: str, payload: Mapping[str, Any], *, finished: bool, sample: str
) -> float:
    """Call a reward and take nothing but a finite number from it.

    A response that never ended is worth 0 and not scored: a truncated answer may look right.
    ``sample`` names the response in errors. Raises DataError for None, NaN, dict, text, ...
    """
    if not finished:
        return 0.0
    try:
        value: object = reward(text, payload, finished)
    except Exception as e:
        raise DataError(f"the reward failed on sample {sample}: {type(e).__name__}: {e}") from e
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        shown = f"{type(value).__name__} {value!r:.80}"
        raise DataError(f"the reward of sample {sample} is {shown}; accepted: a finite number")
    return float(value)


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
        raise _unusable(name, "the name of a function (text, payload, finished) -> float")
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
