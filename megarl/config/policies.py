"""The policy objectives and their settings; ``algos/presets.py`` has a function for each name."""

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import Above0, Interval, Section, Share


class GspoPolicy(Section):
    """The clip range is of the sequence ratio: some 1e-4."""

    name: Literal["gspo"] = "gspo"
    eps_low: Share = 3e-4
    eps_high: Above0 = 4e-4


class GspoTokenPolicy(Section):
    name: Literal["gspo_token"] = "gspo_token"
    eps_low: Share = 3e-4
    eps_high: Above0 = 4e-4


class PpoClipPolicy(Section):
    name: Literal["ppo_clip"] = "ppo_clip"
    eps_low: Share = 0.2
    eps_high: Above0 = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative the loss goes no higher than this times -advantage."""


class SapoPolicy(Section):
    name: Literal["sapo"] = "sapo"
    tau_pos: Above0 = 1.0
    tau_neg: Above0 = 1.05


class CispoPolicy(Section):
    name: Literal["cispo"] = "cispo"
    w_min: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight, absolute."""
    w_max: Above0 | None = None
    """Largest weight, absolute (ScaleRL: 5.0). Either this or ``w_eps_high``."""
    w_eps_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight as a distance from 1: 1 - w_eps_low."""
    w_eps_high: Above0 | None = None
    """Largest weight as a distance from 1: 1 + w_eps_high. Either this or ``w_max``."""
    ppo_mask: bool = False
    """Also drop the tokens that PPO would clip (MiniMax-M1, eq. 7)."""
    eps_low: Share | None = None
    """With ``ppo_mask``: its trust region."""
    eps_high: Above0 | None = None

    @property
    def bounds(self) -> Interval:
        """Absolute bounds of the weight, whichever way they were given."""
        low = self.w_min if self.w_eps_low is None else 1 - self.w_eps_low
        high = self.w_max if self.w_eps_high is None else 1 + self.w_eps_high
        return low, float("inf") if high is None else high


class AspoPolicy(Section):
    name: Literal["aspo"] = "aspo"
    eps_low: Share = 0.2
    eps_high: Above0 = 0.2
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Cap of the weight; gradients remain there."""
    entropy_quantile: Share | None = None
    """Tokens at or above this quantile of their sequence's entropy get ``eps_entropic`` instead
    (the paper's code: 0.8).
    """
    eps_entropic: Share = 0.4
    """Both sides of the clip range of tokens above ``entropy_quantile``."""


class MinirlPolicy(Section):
    name: Literal["minirl"] = "minirl"
    eps_low: Share = 0.2
    eps_high: Above0 = 0.27
    tis_max: Above0 = 5.0
    """Cap of the weight pi / pi_rollout."""


class GmpoPolicy(Section):
    """The clip range is of the token's log-ratio."""

    name: Literal["gmpo"] = "gmpo"
    eps_low: Above0 = 0.4
    eps_high: Above0 = 0.4


class KlCovPolicy(Section):
    name: Literal["kl_cov"] = "kl_cov"
    ratio: Share = 2e-4
    """Share of the tokens, those of highest covariance of advantage and log-prob, to penalise."""
    coef: Above0 = 1.0
    """Weight of |log pi - log pi_old| there."""


class ReinforcePolicy(Section):
    name: Literal["reinforce"] = "reinforce"


class SftPolicy(Section):
    name: Literal["sft"] = "sft"


Policy = Annotated[
    GspoPolicy
    | GspoTokenPolicy
    | PpoClipPolicy
    | SapoPolicy
    | CispoPolicy
    | AspoPolicy
    | MinirlPolicy
    | GmpoPolicy
    | KlCovPolicy
    | ReinforcePolicy
    | SftPolicy,
    Field(discriminator="name"),
]
