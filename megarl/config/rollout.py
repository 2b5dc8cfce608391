"""Settings of rollouts: the servers, how responses are sampled, what is collected and how old it
may be, and what happens when a part fails.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import NonNegative, Positive, Seconds, Section

Choice = Literal["stop", "restart"]

_TRUNCATED = (
    "nothing: truncated sampling has log-probs of another distribution than the trainer's, and "
    "what is trained on is never sampled so; eval.sets may be"
)
_PENALISED = (
    "nothing: penalties make each token's distribution another than the trainer's, and what is "
    "trained on is never sampled so"
)
REFUSED = {
    **{f"rollout.{name}": _TRUNCATED for name in ("top_p", "top_k", "min_p")},
    **{f"rollout.{name}_penalty": _PENALISED for name in ("repetition", "presence", "frequency")},
}
"""Keys that one might expect, and why there are none."""


class Convergence(Section):
    """Mean accuracy of the last ``window`` steps against that of the ``window`` steps before."""

    window: Positive = 20
    min_gain: Annotated[float, Field(ge=0)] = 0.01
    """The stage ends when accuracy has risen by less."""


class LengthStage(Section):
    """A stage ends at a step, or when training has converged; the last one has no end."""

    max_new_tokens: Positive
    until_step: Positive | None = None
    """Last training step of the stage."""
    until_converged: Convergence | None = None


class RolloutSection(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    model: Path | None = None
    """Hugging Face folder of the model in the form in which servers hold it: bf16, fp32, or FP8 in
    blocks (tools/quantize_hf_fp8.py makes one). Managed servers are started from it, and weights
    are sent to all in its form. Null: ``model.hf``, in its FP8 or in ``precision.dtype``.
    """
    urls: tuple[str, ...] = ()
    """Servers that already run (http://host:port). Empty: the run starts and ends its own."""
    discover: bool = False
    """Use the servers that `megarl servers` has started for this run, on whatever machine: they
    tell their addresses in the run directory, and may come and go. docs/rollout-servers.md.
    """
    key_file: Path | None = None
    """File with the servers' key, which begins with no dash; default for managed servers: generated
    into the run directory."""
    servers: Positive = 1
    """Managed servers, all on one machine; each has a whole model."""
    server_tp: Positive = 1
    """SGLang: tensor-parallel ranks of each server; every one of them receives the weights."""
    server_ep: Positive = 1
    """SGLang: expert-parallel ranks of each managed server, among its tensor-parallel ones."""
    server_dp: Positive = 1
    """SGLang: attention replicas of each managed server, among its tensor-parallel ranks
    (data-parallel attention). Whole replicas of the model are ``servers``.
    """
    router_command: tuple[str, ...] = ()
    """Managed servers: program and leading arguments of an sglang-router, e.g. ["python", "-m",
    "sglang_router.launch_router"], through which requests go then. Empty: the run balances by
    itself, by outstanding tokens.
    """
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_new_tokens: Positive = 16
    """Of a whole response, however often it is continued."""
    length_stages: tuple[LengthStage, ...] = ()
    """Response-length curriculum: stage after stage raises ``max_new_tokens``; the last one lasts.
    Empty: ``max_new_tokens`` throughout.
    """
    schedule: Literal["synchronous", "one_step_off", "asynchronous"] = "synchronous"
    """synchronous: a step's responses are sampled by the weights after the step before, while
    nothing trains. one_step_off: those of the next step are sampled while this one trains, whole,
    by the weights of before it. asynchronous: sampling never waits; responses go on under new
    weights.
    """
    max_staleness: NonNegative | None = None
    """Weight versions that the oldest token of a sample may lag behind the weights that train on
    it. Groups beyond are discarded and counted. Null: 1 (synchronous: what a step had too much
    serves the next one), 2 (one_step_off, asynchronous).
    """
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """Prompts asked for, as a multiple of those a step needs. Above 1 a step takes the groups that
    end first; the others serve later steps.
    """
    partial: Literal["continue", "restart", "discard"] = "continue"
    """What becomes of a response that is stopped half-way, as with ``over_sampling`` or
    ``pause_mode`` abort: goes on from its last token under the weights there are then, starts anew
    from its prompt, or is discarded with its group (and counted).
    """
    mask_continued: bool = False
    """Of a response that several weights sampled train only the last ones' tokens."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What servers do with running requests while weights arrive. retract: keep the tokens, compute
    their keys and values anew; in_place: keep keys and values of the old weights; abort: give back
    what there is, for ``partial`` to decide.
    """
    release_memory: bool = False
    """Servers give the memory of weights and of keys and values back as long as the trainer trains,
    which then has the GPUs that both share to itself; for rollout.schedule=synchronous. Keys and
    values get theirs back at the end of a push, when the trainer still holds its weights. Managed
    SGLang servers are started with --enable-memory-saver, others have to be.
    """
    deterministic: bool = False
    """Refuse whatever would let a run depend on what ends first: then it repeats bit for bit."""
    max_attempts: Positive = 5
    """Times that a group is asked for while servers fail it; then it has failed, and is counted."""
    max_in_flight: Positive | None = None
    """Sequences that one collector has at one server at a time, or at all that are behind a router;
    null: as many as there are.
    """
    port: NonNegative = 0
    """Of the first managed server, the others follow; 0 lets the system choose."""
    max_running: Positive = 256
    """Managed embedded server: sequences decoded together."""
    context_length: Positive = 64
    """Prompt + response tokens of the longest sequence. Managed servers are started for so many;
    others have to take as many.
    """
    fixed_shape: bool = True
    """Managed embedded server: always compute full batches, so that a sample's bits do not depend
    on its neighbours.
    """
    fp8: Literal["none", "f32", "power_of_two"] = "none"
    """Managed embedded server: compute as a server of FP8 weights does, in blocks of 128 x 128 with
    scales of this kind, those of activations in 1 x 128. With FP8 weights (``rollout.model``) from
    the codes it received; otherwise it still receives bf16 (or fp32) weights, and rounds them.
    docs/fp8-emulation.md.
    """
    server_command: tuple[str, ...] = ()
    """Managed sglang: program and leading arguments, e.g. ["/opt/sglang/bin/python", "-m",
    "sglang.launch_server"].
    """
    server_args: tuple[str, ...] = ()
    """Managed sglang: further arguments of the server."""
    start_timeout_s: Seconds = 120.0
    """Until a server that was started, or restarted, answers."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one generate request; then the group is asked for elsewhere."""
    probe_every_s: Seconds = 10.0
    """Between probes of a server: requests for a token, not only for a sign of life."""
    probe_timeout_s: Seconds = 30.0
    """A server that has not answered a probe by then counts as hung."""

    @property
    def stages(self) -> tuple[LengthStage, ...]:
        """``length_stages``, or the one stage that the run is without them."""
        return self.length_stages or (LengthStage(max_new_tokens=self.max_new_tokens),)

    @property
    def longest_response(self) -> int:
        return max(stage.max_new_tokens for stage in self.stages)


def staleness_bound(rollout: RolloutSection) -> int:
    """``rollout.max_staleness``, or what it is where that is null."""
    usual = {"synchronous": 1, "one_step_off": 2, "asynchronous": 2}
    return usual[rollout.schedule] if rollout.max_staleness is None else rollout.max_staleness


def stops_half_way(rollout: RolloutSection) -> bool:
    """Whether responses are stopped before they end: recalled when a step has enough, or given back
    when weights arrive.
    """
    if rollout.schedule == "asynchronous":
        return rollout.pause_mode == "abort"
    return rollout.over_sampling > 1


def spans_versions(rollout: RolloutSection) -> bool:
    """Whether a response that is trained may have been sampled by several weights."""
    if stops_half_way(rollout):
        goes_on = rollout.partial == "continue"
    else:
        goes_on = rollout.schedule == "asynchronous"
    # versions that its first token is behind when it is trained, a step after that which it is of
    behind = {"synchronous": 1, "one_step_off": 2, "asynchronous": 1}[rollout.schedule]
    return goes_on and staleness_bound(rollout) >= behind


class OnFailureSection(Section):
    """Null: restart inside a Slurm allocation, stop elsewhere."""

    servers: Choice | None = None
    """A managed server that died or hangs. stop: the run ends and says why. restart: a new one is
    started, gets the weights, and then takes requests; meanwhile others do. Likewise a server of
    rollout.urls, or a discovered one: it is left out until it answers again.
    """
    collectors: Choice | None = None
    """The process that collects the rollouts of a node. restart: its groups are sampled again."""
    trainer: Choice | None = None
    """Trainer ranks. restart: all of them start again from the newest checkpoint, after a pause
    that grows; servers stay. Wrong settings and damaged data end the run all the same.
    """
    max_restarts: NonNegative = 8
    """Of each server, each collector and the trainer, in one start of the run; then it stops."""
