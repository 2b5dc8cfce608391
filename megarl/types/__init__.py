"""The vocabulary: every dataclass that crosses a package, by subject in the files beside this one.

Sizes: N samples in a step, G samples per prompt, L tokens of one sample (prompt + response), Lp
prompt tokens, Lc = L - Lp response tokens, T tokens of a packed row (after padding), S segments in
it, V vocabulary, M MoE layers, K routed experts a token.

One sample's life, with real numbers (prompt ``3 + 5 - 2 = <think>``, ids 9 16 11 17 8 20 2; Lp=7)::

    Prompt(id="p12", token_ids=(9, 16, 11, 17, 8, 20, 2), payload={"answer": "6"})
      -> Completion(token_ids=[14, 17, 8, 3, 12, 1], logprobs=[-.1, ...], finish="stop")    Lc=6
      -> Sample(tokens=[9 ... 2 14 17 8 3 12 1], mask=[F]*7 + [T]*6, rewards=[1.0])         L=13
      -> one segment of a PackedBatch, target-aligned: entry t is about targets[t] = tokens[t + 1]
         tokens   9 16 11 17  8 20  2 14 17  8  3 12  1
         targets 16 11 17  8 20  2 14 17  8  3 12  1  0
         mask     F  F  F  F  F  F  T  T  T  T  T  T  F     the last position is never trained
"""

from megarl.types.batch import ONLY_POLICY, Coefficients, LossInputs, PackedBatch, TrainPlan
from megarl.types.job import Job
from megarl.types.metrics import Max, Mean, Metric, MetricValue, Min, StepMetrics, Sum
from megarl.types.rollout import (
    Completion,
    Finish,
    GroupRequest,
    Member,
    Prompt,
    RoutingShape,
    Sampling,
    VersionSpan,
)
from megarl.types.samples import (
    GroupOutcome,
    Known,
    OneOfKnown,
    Sample,
    SampleFacts,
    Scored,
)
from megarl.types.weights import Delta, Push, SyncReceipt, TensorSpec

__all__ = [
    "ONLY_POLICY",
    "Coefficients",
    "Completion",
    "Delta",
    "Finish",
    "GroupOutcome",
    "GroupRequest",
    "Job",
    "Known",
    "LossInputs",
    "Max",
    "Mean",
    "Member",
    "Metric",
    "MetricValue",
    "Min",
    "OneOfKnown",
    "PackedBatch",
    "Prompt",
    "Push",
    "RoutingShape",
    "Sample",
    "SampleFacts",
    "Sampling",
    "Scored",
    "StepMetrics",
    "Sum",
    "SyncReceipt",
    "TensorSpec",
    "TrainPlan",
    "VersionSpan",
]
