"""Every setting, in one place. The string under a field is its documentation (CLI, docs and error
texts use it).

Layers: YAML files are merged left to right, then dotted overrides (``load.py``); what one field
alone can tell is checked here, what several together imply in ``validate.py``.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.algo import AlgoSection
from megarl.config.evaluation import EvalSection
from megarl.config.fp8 import Fp8Section
from megarl.config.megatron import (
    CpuOffloadSection,
    MoeSection,
    MuonSection,
    OverlapSection,
    PrecisionAwareSection,
    RecomputeSection,
    ScheduleSection,
)
from megarl.config.rollout import OnFailureSection, RolloutSection
from megarl.config.section import Above0, NonNegative, Positive, Seconds, Section


class RunSection(Section):
    dir: Path
    """The run directory: everything a run writes lies here. Two runs never share one."""
    mode: Literal["rl", "sft", "train_only"] = "rl"
    """rl: sample, reward, train, sync. sft: train on demonstrations. train_only: train on recorded
    rollouts.
    """
    steps: Positive
    """Training steps in total (a step of ``rl`` is one rollout batch); a resumed run goes on to the
    same total.
    """
    seed: NonNegative = 0
    """Everything random derives from it."""
    resume: bool = False
    """Go on from the newest checkpoint in the run directory. Without it a directory that holds a
    run is refused.
    """
    stop_grace_s: Annotated[float, Field(gt=0, le=15)] = 10.0
    """After Ctrl-C or SIGTERM: seconds to finish the step and save before the process ends
    regardless.
    """
    timeout_s: Seconds = 600.0
    """Deadline of every collective between trainer ranks."""


class ModelSection(Section):
    hf: Path
    """Hugging Face folder: config.json, tokenizer and, unless ``load`` is set, the initial weights.
    """
    load: Path | None = None
    """Megatron checkpoint to start from (made by tools/convert_hf_to_megatron.py or saved by a
    run).
    """
    config: dict[str, Any] | None = None
    """The architecture, with the keys of config.json (configs/models/): ``megarl plan`` needs no
    folder then. A run compares it with the folder's and refuses another model.
    """


class ParallelSection(Section):
    """The layout; world size = tp * pp * cp * dp. See ``mesh.py`` for what each axis splits."""

    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    dp: Positive = 1
    ep: Positive = 1
    """Experts split over ep ranks, taken out of the tp * cp * dp ranks of a pipeline stage."""
    etp: Positive | None = None
    """Tensor parallelism inside an expert; default: tp."""
    vpp: Positive = 1
    """Model chunks a pipeline stage holds (interleaved schedule); needs pp > 1."""
    first_layers: Positive | None = None
    """Layers of the first pipeline stage; default: as many as the others. Fewer make room for the
    embedding. Needs pp > 1.
    """
    last_layers: Positive | None = None
    """Layers of the last pipeline stage; default: as many as the others. Fewer make up for the
    output head and the loss. Needs pp > 1.
    """


class PrecisionSection(Section):
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of parameters and activations. Main parameters, log-probs and losses are fp32 either way."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of gradients, as they are accumulated over microbatches and reduced over ranks. bf16: half
    the memory and traffic, and sums of many rows lose bits.
    """
    fp8: Fp8Section | None = None


class OptimSection(Section):
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[float, float] = (0.9, 0.98)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Global gradient norm limit; 0 switches clipping off."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """schedule.lr: wsd: share of the run, at its end, over which the learning rate falls to
    ``min_lr_ratio * lr``.
    """
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    schedule: ScheduleSection = ScheduleSection()
    distributed: bool = True
    """Megatron's distributed optimizer: states split over the data-parallel ranks."""
    name: Literal["adam", "muon"] = "adam"
    """adam: AdamW, by Transformer Engine, NVIDIA's apex or torch, the first that is installed.
    muon: orthogonalised momentum for the matrices of linear layers, AdamW for the rest; needs the
    package emerging-optimizers and distributed: false.
    """
    muon: MuonSection = MuonSection()
    precision_aware: PrecisionAwareSection | None = None
    cpu_offload: CpuOffloadSection | None = None


class CriticOptimSection(Section):
    """What is null is as ``optim`` has it."""

    betas: tuple[float, float] | None = None
    eps: Above0 | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip_grad: Annotated[float, Field(ge=0)] | None = None
    """Of the critic's own gradient norm."""
    warmup_steps: NonNegative | None = None
    """The critic's optimizer steps are those of the whole run, ``critic.warmup_steps`` included."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    distributed: bool | None = None


class CriticSection(Section):
    lr: Above0 | None = None
    """Learning rate of a value model for ``algo.advantage.name: gae``. It starts as the policy does
    unless ``hf`` or ``load`` are set, with a head of zeros, and its values replace recorded ones.
    null: no such model; train_only then needs recorded values.
    """
    optim: CriticOptimSection = CriticOptimSection()
    """The other settings of its optimizer, where they are not those of ``optim``."""
    hf: Path | None = None
    """Hugging Face folder of another model with the same tokens: its dimensions and, unless
    ``critic.load`` is set, its weights. Where it holds ``score.weight``, as a reward model with one
    output does, that is the head; an output layer is not read. null: ``model.hf``.
    """
    load: Path | None = None
    """Checkpoint to start from: its critic with its head, or, where it has none, its policy below a
    head of zeros.
    """
    warmup_steps: NonNegative = 0
    """Training steps at the start of the run in which the critic alone is trained: the policy,
    its learning-rate schedule and the controllers of ``algo`` stay where they are.
    """
    parallel: ParallelSection | None = None
    """A layout of its own on the same ranks (the same product of tp, pp, cp and dp); null: that of
    ``parallel``.
    """


class DataSection(Section):
    prompts: Path | None = None
    """rl: JSONL, a line each: {"id", "prompt", "answer", ...}; all keys but prompt go to the
    reward.
    """
    heldout: Path | None = None
    """rl: JSONL of the same form, never trained on; measured greedily every ``eval.every`` steps.
    """
    demonstrations: Path | None = None
    """sft: JSONL, a line each: {"prompt", "response"}; the end token is appended."""
    recorded: Path | None = None
    """train_only: a folder of recorded rollouts (``rollouts/`` of an earlier run)."""
    reward: str = "exact_match"
    """exact_match, reasoning_gym:DATASET, or import:package.module:function (docs/rewards.md)."""
    reward_timeout_s: Seconds = 60.0
    """Deadline of the reward of one response; then its process is killed and the group has failed.
    """
    prompts_per_step: Positive = 32
    """rl: prompts sampled a step. sft: demonstrations a step."""
    samples_per_prompt: Positive = 8


class SyncSection(Section):
    transport: Literal["broadcast", "colocated", "disk"] = "broadcast"
    """How weights get to servers. broadcast: process groups. colocated: trainer and servers are on
    one machine, and servers read the trainer's memory. disk: Hugging Face folders in ``folder``,
    for servers that share nothing but a file system; whoever comes later loads the last one.
    """
    folder: Path | None = None
    """disk: where the last two versions lie, one folder each; every server finds it under the same
    path. null: weights/ in the run directory.
    """
    senders: Annotated[int, Field(ge=1, le=4)] = 1
    """Ranks of every pipeline stage that send to servers, each a part of its layers, and of experts
    those of the expert-parallel ranks from its own on: as many senders as these gather none.
    """
    fp8: Literal["auto", "f32", "power_of_two"] = "auto"
    """Where servers hold FP8 (``rollout.model``) and their config.json does not say how scales are
    rounded (``scale_fmt``): f32 (auto), as they are; power_of_two: up to one, for servers that
    would round them so themselves, and the codes with them, as SGLang with DeepGEMM on Blackwell
    GPUs does.
    """
    delta: bool = False
    """Send what changed of weights that all servers hold, instead of the weights. Senders keep a
    copy in host memory of what they sent last, and SGLang servers one of all weights on each of
    their machines. docs/weight-delta.md.
    """
    bucket_mb: Annotated[float, Field(gt=0)] = 256.0
    """Of a bucket; every sender has memory for two. disk: of a file."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl for servers named in rollout.urls where there are GPUs, else gloo through host
    memory: servers that megarl starts share GPUs with the trainer, which NCCL does not take.
    """
    timeout_s: Seconds = 120.0
    """Deadline of every control call and of every bucket. disk: of the whole of a load."""


class TrainSection(Section):
    row_tokens: Positive = 4096
    """Token budget of a packed row (a microbatch of one rank, before context parallelism splits
    it).
    """
    row_buckets: Annotated[int, Field(ge=1, le=64)] = 1
    """How many lengths the rows of an optimizer step may have. 1: all are padded to the longest.
    More save padding where samples are long for a row (half of one or more): every microbatch then
    has the shortest of the lengths that holds its rows, the same on all ranks. Pipeline stages then
    tell each other the shape of every activation they exchange.
    """
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """What layers are made of: Megatron's own modules, or Transformer Engine's, which need a GPU.
    auto: Transformer Engine's where it and GPUs are, unless ``precision.fp8`` is emulated.
    Checkpoints of either are read by both. docs/transformer-engine.md.
    """
    gradient_accumulation_fusion: Literal["auto", "always", "never"] = "auto"
    """Weight gradients are added to the accumulated ones by the matrix product itself: apex's
    kernel fused_weight_gradient_mlp_cuda. auto: where it is installed.
    """
    frozen: tuple[str, ...] = ()
    """Parameters of the policy that are not trained: patterns with ``*``, ``?`` and ``[...]`` on
    whole names, Megatron's or Hugging Face's, e.g. ``model.embed_tokens.weight``,
    ``*.mlp.gate.weight`` (routers and their biases), ``model.layers.[0-3].*``. They have no
    gradient and no optimizer state; they are exported and saved all the same. A pattern that
    matches nothing is an error, and so are some of what Megatron holds as one: q, k and v, gate
    and up, and the experts of a layer.
    """
    on_nonfinite: Literal["skip", "drop", "raise"] = "skip"
    """A NaN or infinity among a trained token's numbers, or in the gradient norm. skip: no
    optimizer step, said in the log and counted. drop: the token (for sequence objectives the
    sequence) is left out. raise: the run ends with an error. Either way the rows are kept under
    nonfinite/ in the run directory (docs/nonfinite.md).
    """


class CheckpointSection(Section):
    every: NonNegative = 0
    """Steps between checkpoints; one is always written at the end. 0: only there."""
    keep: Positive = 2
    """Newest checkpoints kept; older ones are removed only after a newer one is complete."""


class MemorySection(Section):
    offload: Literal["none", "idle"] = "none"
    """idle: weights, optimizer state and gradient buffers of the policy and of a critic lie in host
    memory (pinned, where there are GPUs) whenever that model is not computing, so that rollout
    servers can share the GPUs. At most one of the two is on the device at a time. What is computed
    stays the same to the last bit; every phase moves what it needs in and out.
    """


class MonitorSection(Section):
    tensorboard: bool = True
    samples_per_step: NonNegative = 8
    """Samples of a step kept readable for ``megarl samples``."""
    moe_layers: bool = False
    """The routers' largest load and entropy of every layer by itself, ``moe/layer_NNN/*``, besides
    those of all layers (docs/routers.md).
    """
    record_rollouts: bool = False
    """Keep every step's rollouts under rollouts/, for ``train_only`` runs; a file a node."""


class Config(Section):
    run: RunSection
    model: ModelSection
    algo: AlgoSection
    optim: OptimSection
    critic: CriticSection = CriticSection()
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection = PrecisionSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    on_failure: OnFailureSection = OnFailureSection()
    sync: SyncSection = SyncSection()
    train: TrainSection = TrainSection()
    recompute: RecomputeSection = RecomputeSection()
    overlap: OverlapSection = OverlapSection()
    moe: MoeSection = MoeSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    memory: MemorySection = MemorySection()
    monitor: MonitorSection = MonitorSection()

    @property
    def critic_optim(self) -> OptimSection:
        """The critic's optimizer, all of it. There is a critic."""
        assert self.critic.lr is not None
        own = self.critic.optim
        settings = {
            "betas": own.betas,
            "eps": own.eps,
            "weight_decay": own.weight_decay,
            "clip_grad": own.clip_grad,
            "warmup_steps": own.warmup_steps,
            "decay_fraction": own.decay_fraction,
            "min_lr_ratio": own.min_lr_ratio,
            "distributed": own.distributed,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return self.optim.model_copy(update={**given, "lr": self.critic.lr})

    @property
    def critic_hf(self) -> Path:
        """The folder that says what model the critic is."""
        return self.critic.hf or self.model.hf

    @property
    def critic_load(self) -> Path | None:
        """The checkpoint that the critic starts from, if any."""
        return self.critic.load or (None if self.critic.hf else self.model.load)

    @property
    def server_hf(self) -> Path:
        """The folder that servers are started from, whose form their weights have."""
        return self.rollout.model or self.model.hf

    @property
    def critic_parallel(self) -> ParallelSection:
        return self.critic.parallel or self.parallel
