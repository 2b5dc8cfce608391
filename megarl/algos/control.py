"""Coefficients that follow what they control. Their state is part of every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config.algo import AdaptiveEntropy, AdaptiveKl, AlgoSection
from megarl.types import Coefficients


class Controller(Protocol):
    def coefficient(self, measured: float) -> float:
        """Of this step, in which ``measured`` was found before the update."""
        ...

    def update(self, measured: float, samples: int) -> None:
        """After the step."""
        ...

    def state(self) -> float | None:
        """None: there is nothing to remember."""
        ...

    def load_state(self, state: float) -> None: ...


@dataclass
class Constant:
    value: float

    def coefficient(self, measured: float) -> float:
        return self.value

    def update(self, measured: float, samples: int) -> None:
        return

    def state(self) -> None:
        return None

    def load_state(self, state: float) -> None:
        """The configuration's value counts, also when a run goes on."""


@dataclass
class EntropyController:
    """c where the mean entropy e is at or below the target, else 0; then c moves by delta towards
    more entropy (e <= target) or less, inside [c_min, c_max].

    e: full entropy, nats, token mean over the global batch. Source: Skywork-OR1, arXiv 2505.22312,
    section 4; docs/objectives.md, "Adaptive coefficient".
    """

    section: AdaptiveEntropy
    c: float

    def coefficient(self, measured: float) -> float:
        return self.c if measured <= self.section.target else 0.0

    def update(self, measured: float, samples: int) -> None:
        s = self.section
        step = s.delta if measured <= s.target else -s.delta
        self.c = min(max(self.c + step, s.c_min), s.c_max)

    def state(self) -> float:
        return self.c

    def load_state(self, state: float) -> None:
        self.c = state


@dataclass
class KlController:
    """beta <- beta (1 + clip(KL/target - 1, -0.2, 0.2) samples/horizon), by a factor of 1/10 or
    more: a horizon of a few samples must not turn the sign.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """

    section: AdaptiveKl
    beta: float

    def coefficient(self, measured: float) -> float:
        return self.beta

    def update(self, measured: float, samples: int) -> None:
        error = min(max(measured / self.section.target - 1, -0.2), 0.2)
        self.beta *= max(0.1, 1 + error * samples / self.section.horizon)

    def state(self) -> float:
        return self.beta

    def load_state(self, state: float) -> None:
        self.beta = state


@dataclass
class Controllers:
    """Of the loss's two further terms."""

    kl: Controller
    entropy: Controller

    @classmethod
    def of(cls, algo: AlgoSection) -> "Controllers":
        kl: Controller = Constant(algo.kl.coef if algo.kl else 0.0)
        if algo.kl is not None and algo.kl.adaptive is not None:
            kl = KlController(algo.kl.adaptive, algo.kl.coef)
        return cls(kl, _entropy(algo.entropy))

    def coefficients(self, kl: float, entropy: float) -> Coefficients:
        return Coefficients(self.kl.coefficient(kl), self.entropy.coefficient(entropy))

    def update(self, kl: float, entropy: float, samples: int) -> None:
        self.kl.update(kl, samples)
        self.entropy.update(entropy, samples)

    def state(self) -> dict[str, Any]:
        return {"kl": self.kl.state(), "entropy": self.entropy.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of an earlier part of the run. What had no controller then starts from the
        configuration.
        """
        for name, controller in (("kl", self.kl), ("entropy", self.entropy)):
            if state.get(name) is not None:
                controller.load_state(state[name])


def _entropy(section: Any) -> Controller:
    if section is None:
        return Constant(0.0)
    if isinstance(section, AdaptiveEntropy):
        return EntropyController(section, section.c0)
    return Constant(section.coef)
