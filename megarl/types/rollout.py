"""What goes to rollout servers and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """What is asked. ``payload`` is private to the task (answer, metadata) and never reaches a
    server.
    """

    id: str
    token_ids: tuple[int, ...]
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``[start, end)`` were sampled by weights ``version`` of ``server``."""

    version: int
    start: int
    end: int
    server: str = ""  # its name; empty where nobody asked


@dataclass(frozen=True)
class RoutingShape:
    """What routing is of a model: ``moe_layers`` [layers], True where a layer has experts, of which
    ``topk`` of ``experts`` are chosen for a token.
    """

    moe_layers: tuple[bool, ...]
    topk: int
    experts: int

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled; everything else of SGLang's parameters stays neutral. What is
    trained on is never truncated (top_p, top_k, min_p): its log-probs would be of another
    distribution than the trainer's.
    """

    temperature: float
    max_new_tokens: int  # of the whole response, continuations included
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One response as the server returned it; ``logprobs[t]`` is of ``token_ids[t]``, natural log,
    fp32.
    """

    request_id: str
    token_ids: NDArray[np.int32]  # [Lc]
    logprobs: NDArray[np.float32]  # [Lc]
    finish: Finish
    version_spans: tuple[VersionSpan, ...]
    routing: NDArray[Any] | None = None  # u8 | u16 [L - 1, M, K]; the last token was never routed


@dataclass(frozen=True)
class GroupRequest:
    """A prompt of which ``len(seeds)`` samples are wanted: a group, from its issue to its end."""

    serial: int  # it is the n-th group that the run issued, counted from 0
    step: int  # which it was issued for
    prompt: Prompt
    seeds: tuple[int, ...]  # one a sample
    sampling: Sampling


@dataclass(frozen=True)
class Member:
    """A rollout server that answers. ``boot`` is of one start of its process: a server that has
    been restarted is another member, without the weights of the one before.
    """

    name: str
    url: str
    boot: str
    ranks: int = 1  # of a weight group
    version: str = ""  # of its software, like "sglang 0.5.23"
