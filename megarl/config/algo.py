"""The settings of the algorithm: what is optimised, from which advantages, against which
references.

A choice with settings of its own is a section with a ``name``; naming another one drops the
settings of the one before. The objectives are in ``policies.py``. Formulas: docs/objectives.md.
"""

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.policies import Policy
from megarl.config.section import Above0, Interval, NonNegative, Positive, Section

# ---- advantages


class GroupAdvantage(Section):
    """An advantage a sample, from the rewards of its prompt's samples."""

    name: str
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a prompt's only valid sample: 0, or its reward as it is (verl's rule)."""
    truncated_variant: Literal["exclude", "include"] | None = None
    """Truncated samples get advantage 0, and are left out of the group's statistics or counted in
    them (Skywork-OR1's two masks). Their tokens stay in the denominators.
    """


class GrpoAdvantage(GroupAdvantage):
    name: Literal["grpo"] = "grpo"
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """1: sample standard deviation; 0: population."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides: the prompt's samples', all raw rewards', or nothing."""


class DrGrpoAdvantage(GroupAdvantage):
    name: Literal["dr_grpo"] = "dr_grpo"


class RlooAdvantage(GroupAdvantage):
    name: Literal["rloo"] = "rloo"


class GrpoLooAdvantage(GroupAdvantage):
    """Mean and standard deviation of the others, for every sample."""

    name: Literal["grpo_loo"] = "grpo_loo"
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    eps: Annotated[float, Field(ge=0)] = 1e-6


class OpoAdvantage(GroupAdvantage):
    """The baseline is the mean reward weighted by response lengths."""

    name: Literal["opo"] = "opo"


class GpgAdvantage(GroupAdvantage):
    name: Literal["gpg"] = "gpg"
    f_norm: Above0 = 1.0


class ProcessAdvantage(Section):
    """GRPO with a reward a reasoning step."""

    name: Literal["grpo_process"] = "grpo_process"
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    eps: Annotated[float, Field(ge=0)] = 1e-6


class GdpoAdvantage(Section):
    """Every reward component is normalised by itself before they are summed."""

    name: Literal["gdpo"] = "gdpo"
    weights: tuple[float, ...] | None = None
    """One a reward component, in their order; null: 1 each."""
    eps: Annotated[float, Field(ge=0)] = 1e-4


class ReinforcePpAdvantage(Section):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0


class ReinforcePpBaselineAdvantage(Section):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class GaeAdvantage(Section):
    """Needs values: of a critic, or recorded ones."""

    name: Literal["gae"] = "gae"
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    masked_reward: Literal["credit_prev", "drop"] = "credit_prev"
    """A reward on a token that is not trained counts for the trained token before it, or not at
    all.
    """
    bootstrap_truncated: bool = False
    """A truncated response goes on from its last value, instead of ending with 0."""
    whiten: bool = True
    """Advantages of the whole batch get mean 0 and variance 1."""


Advantage = Annotated[
    GrpoAdvantage
    | DrGrpoAdvantage
    | RlooAdvantage
    | GrpoLooAdvantage
    | OpoAdvantage
    | GpgAdvantage
    | ProcessAdvantage
    | GdpoAdvantage
    | ReinforcePpAdvantage
    | ReinforcePpBaselineAdvantage
    | GaeAdvantage,
    Field(discriminator="name"),
]

# ---- aggregation


class _OfKept(Section):
    denominator_mask: Literal["original", "kept"] = "original"
    """Whether tokens that ``algo.correction`` rejects still count."""

    @property
    def counts_kept(self) -> bool:
        return self.denominator_mask == "kept"


class SequenceMean(_OfKept):
    seq_denominator: Literal["nonempty", "all"] = "nonempty"
    """Sequences counted: those with a trained token, or all."""


class TokenMean(_OfKept):
    name: Literal["token_mean"] = "token_mean"


class SeqMeanTokenMean(SequenceMean):
    name: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"


class SeqMeanTokenSum(SequenceMean):
    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"


class ConstantDenominator(Section):
    name: Literal["constant"] = "constant"
    constant: Above0
    """Every sequence's sum is divided by it, e.g. the longest response of the run (Dr.GRPO)."""

    @property
    def counts_kept(self) -> bool:
        return False


class GroupTokenMean(_OfKept):
    name: Literal["group_token_mean"] = "group_token_mean"


Aggregation = Annotated[
    TokenMean | SeqMeanTokenMean | SeqMeanTokenSum | ConstantDenominator | GroupTokenMean,
    Field(discriminator="name"),
]

# ---- further terms of the loss


class AdaptiveKl(Section):
    target: Above0
    """Mean KL, nats a token, that the coefficient is steered to."""
    horizon: Above0
    """Samples in which a KL that is off by 20 % or more moves the coefficient by a fifth of it."""


class KlSection(Section):
    """Divergence from the reference policy: the model the run started from, or of a later step."""

    type: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator; k3+ has k3's value and k2's gradient. docs/objectives.md says which gradients are
    unbiased.
    """
    coef: Annotated[float, Field(ge=0)]
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on every token's reward (gae and reinforce_pp)."""
    input_clamp: Above0 | None = 20.0
    """The log-ratio to the reference is held in [-this, this]."""
    output_clamp: Above0 | None = 10.0
    """The estimate is held in [-this, this]."""
    is_weight: Literal["old", "self", "none"] | None = None
    """Multiply the estimate by pi / pi_old (unbiased also off-policy; k1 and k3), or by pi over
    itself (unbiased on-policy; k3). null: old for k3 in the loss, none for the others.
    """
    adaptive: AdaptiveKl | None = None
    """Steer ``coef`` (its first value) to a target."""
    reference_every: NonNegative = 0
    """After every so many training steps the policy of that moment becomes the reference; it is
    saved in checkpoints. 0: the reference stays the model the run started from.
    """

    @property
    def weight(self) -> Literal["old", "self", "none"]:
        default: Literal["old", "none"] = "old" if self.place == "loss" else "none"
        return self.is_weight or (default if self.type == "k3" else "none")


class ConstantEntropy(Section):
    name: Literal["constant"] = "constant"
    coef: Above0


class AdaptiveEntropy(Section):
    """Skywork-OR1's controller: a bonus while the entropy is at or below a target."""

    name: Literal["adaptive"] = "adaptive"
    target: Above0 = 0.2
    delta: Above0 = 0.005
    """What the coefficient moves by, every step."""
    c0: Annotated[float, Field(ge=0)] = 0.0
    c_min: Annotated[float, Field(ge=0)] = 0.0
    c_max: Above0 = 1.0


Entropy = Annotated[ConstantEntropy | AdaptiveEntropy, Field(discriminator="name")]


class CorrectionSection(Section):
    """Weights against the mismatch of trainer and rollout server, rho = pi_old / pi_rollout."""

    level: Literal["token", "sequence", "geometric"] | None = None
    """Whose rho is the weight: the token's, the product over the sequence, or the product's n-th
    root. null: no weight, only the filters below.
    """
    mode: Literal["truncate", "mask"] = "truncate"
    """Weights outside [low, high] are brought to its ends (TIS), or dropped (MIS, IcePop)."""
    low: Annotated[float, Field(ge=0)] | None = None
    high: Above0 | None = None
    geo_filter: Interval | None = None
    """Drop sequences whose geometric-mean rho is outside."""
    k2_filter: Above0 | None = None
    """Drop tokens whose (log rho)^2 / 2 is larger."""
    k3_filter: Above0 | None = None
    """Drop sequences whose mean rho - 1 - log rho is larger."""
    veto: Above0 | None = None
    """Drop sequences with any token's rho below it."""
    batch_normalize: bool = False
    """Divide all weights by their mean over the optimizer step."""


class OpsmSection(Section):
    """Off-policy sequence masking (DeepSeek-V3.2): sequences with negative advantage that moved
    away.
    """

    delta: float
    """Largest mean log-prob lost since ``against``."""
    against: Literal["rollout", "old"] = "rollout"


class ValueSection(Section):
    clip: Above0 | None = 0.2
    """Values move no further than this from the old ones; null: no clipping."""


class OverlongSection(Section):
    """Soft overlong punishment: 0 up to l_max - l_cache tokens, falling to -1 at l_max."""

    l_max: Positive
    l_cache: Positive


class DynamicSampling(Section):
    """Prompts whose samples are all right or all wrong are replaced by further ones."""

    max_rounds: Positive = 4
    """Batches sampled for one step at most; prompts still missing then are filled up with
    uninformative ones. (train_only: one, the recording.)
    """


class AlgoSection(Section):
    policy: Policy
    """The objective and its own settings, e.g. ``{name: gspo, eps_low: 3e-4, eps_high: 4e-4}``."""
    advantage: Advantage = GrpoAdvantage()
    aggregation: Aggregation = SeqMeanTokenMean()
    """How token losses become one number; counts are global over the optimizer step."""
    kl: KlSection | None = None
    entropy: Entropy | None = None
    """Entropy bonus; null: none."""
    correction: CorrectionSection | None = None
    opsm: OpsmSection | None = None
    value: ValueSection | None = None
    """Loss of the critic; null: the defaults below."""
    overlong: OverlongSection | None = None
    overlong_filter: bool = False
    """Truncated responses are not trained on: their tokens leave numerators and denominators."""
    dynamic_sampling: DynamicSampling | None = None
    minibatches: Positive = 1
    """Optimizer steps a rollout batch is split into, by prompt."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The ratio's denominator: recomputed by the trainer before the update, or taken from the
    rollout server.
    """

    @property
    def needs_values(self) -> bool:
        """Whether advantages come from values, hence from a critic or a recording."""
        return isinstance(self.advantage, GaeAdvantage)
