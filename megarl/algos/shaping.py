"""What a response's length and a prompt's results say about training on it. Host data, float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def informative_groups(correct: Sequence[float], groups: Sequence[int]) -> dict[int, bool]:
    """Label of every group, in order of first appearance -> whether it can teach anything.

    It can iff ``0 < #correct < size``, on raw correctness: under shaped rewards a length penalty
    would make every group look informative. ``correct`` [N]: 1 is correct; less, or NaN, is not.

    Source: DAPO, arXiv 2503.14476, dynamic sampling.
    """
    size: dict[int, int] = {}
    right: dict[int, int] = {}
    for value, group in zip(correct, groups, strict=True):
        size[group] = size.get(group, 0) + 1
        right[group] = right.get(group, 0) + (value >= 1)
    return {group: 0 < right[group] < size[group] for group in size}


def overlong_penalty(lengths: Sequence[int], l_max: int, l_cache: int) -> NDArray[np.float64]:
    """f64 [N]: soft overlong punishment of responses of n = ``lengths`` tokens::

        0                                 n <= l_max - l_cache
        ((l_max - l_cache) - n) / l_cache     n <= l_max
        -1                                beyond

    Added to the reward before advantages are computed. Source: DAPO, arXiv 2503.14476.
    """
    beyond = (l_max - l_cache) - np.asarray(lengths, np.float64)
    return np.clip(beyond / l_cache, -1.0, 0.0)
