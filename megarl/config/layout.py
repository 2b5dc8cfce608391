"""Does the model fit the layout? World size, and every dimension that a parallel axis divides.

1. world size = tp * pp * cp * dp.
2. tp divides attention heads, key/value heads and the dense layers' inner size; etp the experts',
   unless they have biases: then it is 1.
3. ep divides the experts; ep * etp divides the tp * cp * dp ranks of a pipeline stage.
4. pp divides the layers (those that first_layers and last_layers leave: the stages that these do
   not name), vpp those of every stage; vpp, first_layers and last_layers need pp > 1.
5. A row of ``train.row_tokens`` holds a whole chunk for each of its 2 * cp * tp shares, and in FP8
   each of its cp * tp shares a multiple of 16 or 32 tokens.
The vocabulary is padded to a multiple of tp, and the hidden size is not divided by any axis.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from megarl.config.fp8 import row_alignment
from megarl.config.schema import Config, ParallelSection
from megarl.errors import Problem

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_WHOLE_EXPERTS = ("gpt_oss",)  # model_type whose experts have biases: Megatron does not split them
_NEEDED = ("model_type", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class Dims:
    """What config.json says of the sizes an axis may divide; 0 where the model has no such part."""

    heads: int
    kv_heads: int
    layers: int
    dense_ffn: int
    shared_ffn: int
    moe_ffn: int
    experts: int
    whole_experts: bool  # tensor parallelism cannot split an expert
    latent: bool = False  # attention through a latent (MLA)

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "Dims":
        def size(*names: str) -> int:
            values = (hf.get(name) for name in names)
            return next((v for v in values if isinstance(v, int) and v > 0), 0)

        heads, experts = size("num_attention_heads"), size(*_EXPERTS)
        moe_ffn = size("moe_intermediate_size", "intermediate_size") if experts else 0
        latent = hf.get("kv_lora_rank") is not None  # MLA has no key/value heads of its own
        return Dims(
            heads=heads,
            kv_heads=heads if latent else size("num_key_value_heads") or heads,
            layers=size("num_hidden_layers"),
            dense_ffn=size("intermediate_size") if _has_dense_layers(hf, experts) else 0,
            shared_ffn=size("shared_expert_intermediate_size")
            or size("n_shared_experts") * moe_ffn,
            moe_ffn=moe_ffn,
            experts=experts,
            whole_experts=hf.get("model_type") in _WHOLE_EXPERTS,
            latent=latent,
        )


def _has_dense_layers(hf: Mapping[str, Any], experts: int) -> bool:
    return not experts or bool(
        hf.get("first_k_dense_replace")
        or hf.get("mlp_only_layers")
        or (hf.get("decoder_sparse_step") or 1) > 1
    )


def layout_problems(
    config: Config,
    world_size: int | None,
    hf: Mapping[str, Any] | None,
    critic_hf: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Of the policy, then of a critic that has a layout or a model of its own. ``critic_hf``: the
    config.json of ``critic.hf``, None: not checked.
    """
    row, align = config.train.row_tokens, row_alignment(config.precision.fp8)
    actor = _Subject("", config.parallel, row, align)
    found = list(_problems(actor, world_size, hf))
    yield from found
    stage = config.parallel.tp * config.parallel.cp * config.parallel.dp
    if config.sync.senders > stage:
        accepted = f"1 to {stage}: the ranks of a pipeline stage"
        yield Problem("sync.senders", str(config.sync.senders), accepted)
    there = config.critic.lr is not None and config.algo.needs_values
    if not there or not (config.critic.parallel or config.critic.hf):
        return
    p = config.parallel
    ranks = p.tp * p.pp * p.cp * p.dp
    where = "critic." if config.critic.parallel else ""
    other_model = config.critic.hf is not None
    critic = _Subject(where, config.critic_parallel, row, align, other_model)
    of_critic = list(_problems(critic, ranks, critic_hf if config.critic.hf else hf))
    yield from (problem for problem in of_critic if problem not in found)
    if hf and critic_hf and (hf.get("vocab_size") or 0) > (critic_hf.get("vocab_size") or 0):
        tokens = f"a model of {critic_hf.get('vocab_size')} tokens"
        yield Problem("critic.hf", tokens, f"one with the {hf['vocab_size']} tokens of model.hf")


@dataclass(frozen=True)
class _Subject:
    """A model's layout; ``prefix`` of its keys."""

    prefix: str
    parallel: ParallelSection
    row_tokens: int
    align: int  # of a rank's tokens
    other_model: bool = False  # that of critic.hf

    def key(self, axis: str = "") -> str:
        return f"{self.prefix}parallel" + (f".{axis}" if axis else "")

    @property
    def hf_key(self) -> str:
        return "critic.hf" if self.other_model else "model.hf"


def _problems(
    subject: _Subject, world_size: int | None, hf: Mapping[str, Any] | None
) -> Iterator[Problem]:
    p = subject.parallel
    size = p.tp * p.pp * p.cp * p.dp
    if world_size is not None and size != world_size:
        found = f"tp {p.tp} * pp {p.pp} * cp {p.cp} * dp {p.dp} = {size}"
        yield Problem(subject.key(), found, f"a product equal to the number of ranks, {world_size}")
    if p.vpp > 1 and p.pp == 1:
        interleaved = "the schedule interleaves the chunks of several stages"
        yield Problem(
            subject.key("vpp"), str(p.vpp), f"1, or {subject.key('pp')} > 1: {interleaved}"
        )
    if p.pp == 1:
        for axis, n in _named_stages(p).items():
            accepted = f"null, or {subject.key('pp')} > 1: one stage holds every layer"
            yield Problem(subject.key(axis), str(n), accepted)
    multiple = lcm(p.tp * (2 * p.cp if p.cp > 1 else 1), p.cp * p.tp * subject.align)
    if subject.row_tokens % multiple:
        shares = f"tp {p.tp}" if p.cp == 1 else f"2 * cp {p.cp} * tp {p.tp}"
        if subject.align > 1:
            shares = f"cp {p.cp} * tp {p.tp} * {subject.align} tokens for precision.fp8"
        of = " of critic.parallel" if subject.prefix else ""
        accepted = f"a multiple of {multiple} ({shares}{of})"
        yield Problem("train.row_tokens", str(subject.row_tokens), accepted)
    if hf is not None:
        missing = [name for name in _NEEDED if not hf.get(name)]
        if missing:
            found = f"a config.json without {', '.join(missing)}"
            yield Problem(subject.hf_key, found, "a causal language model's config.json")
        else:
            yield from _divisions(subject, Dims.of(hf))
    yield from _expert_grid(subject, None if hf is None else Dims.of(hf).experts)


def _divisions(subject: _Subject, dims: Dims) -> Iterator[Problem]:
    p = subject.parallel
    etp = p.etp or p.tp
    whose = " of critic.hf" if subject.other_model else ""
    for axis, degree, name, total in (
        ("tp", p.tp, "num_attention_heads", dims.heads),
        ("tp", p.tp, "num_key_value_heads", dims.kv_heads),
        ("tp", p.tp, "intermediate_size", dims.dense_ffn),
        ("tp", p.tp, "the shared experts' intermediate size", dims.shared_ffn),
        ("etp" if p.etp else "tp", etp, "moe_intermediate_size", dims.moe_ffn),
        ("ep", p.ep, "the number of experts", dims.experts),
    ):
        if total % degree:
            accepted = f"a divisor of {name} = {total}{whose} ({_divisors(total)})"
            yield Problem(subject.key(axis), str(degree), accepted)
    if dims.whole_experts and etp > 1:
        found = str(p.etp) if p.etp else f"{etp}, which is tp by default"
        accepted = "1: Megatron does not split experts with biases"
        yield Problem(subject.key("etp"), found, accepted)
    if p.pp > 1:
        yield from _stages(subject, dims.layers, whose)


def _named_stages(p: ParallelSection) -> dict[str, int]:
    given = {"first_layers": p.first_layers, "last_layers": p.last_layers}
    return {axis: n for axis, n in given.items() if n is not None}


def _stages(subject: _Subject, layers: int, whose: str) -> Iterator[Problem]:
    """One problem at a time: of stages of unequal size, vpp is not what is wrong."""
    p = subject.parallel
    given = {subject.key(axis): n for axis, n in _named_stages(p).items()}
    left, stages = layers - sum(given.values()), p.pp - len(given)
    if not given and layers % p.pp:
        accepted = f"a divisor of num_hidden_layers = {layers}{whose} ({_divisors(layers)}), "
        accepted += "or first_layers and last_layers set"
        yield Problem(subject.key("pp"), str(p.pp), accepted)
    elif left < stages or (left % stages if stages else left):
        found = ", ".join(f"{n} of num_hidden_layers = {layers}{whose}" for n in given.values())
        rest = f"for pp {p.pp} - {len(given)} = {stages} other stages, found {left} left"
        accepted = f"a multiple of {stages} layers left {rest}" if stages else "all of them"
        yield Problem(" and ".join(given), found, accepted)
    else:
        equal = left // stages if stages else 0
        sizes = {**given, f"num_hidden_layers / pp {p.pp}{whose}": equal}
        for name, size in sizes.items():
            if size % p.vpp:
                accepted = f"a divisor of {name} = {size} ({_divisors(size)})"
                yield Problem(subject.key("vpp"), str(p.vpp), accepted)


def _expert_grid(subject: _Subject, experts: int | None) -> Iterator[Problem]:
    p = subject.parallel
    if experts == 0:
        if p.ep > 1:
            yield Problem(subject.key("ep"), str(p.ep), "1: the model has no experts")
        return
    stage, etp = p.tp * p.cp * p.dp, p.etp or p.tp
    if stage % (p.ep * etp):
        default = "" if p.etp else " (etp is tp by default)"
        found = f"ep {p.ep} * etp {etp} = {p.ep * etp}{default}"
        accepted = f"a product that divides tp {p.tp} * cp {p.cp} * dp {p.dp} = {stage}"
        yield Problem(subject.key("ep"), found, accepted)


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 64) + 1) if n % d == 0]
    return ", ".join(map(str, found)) + (", ..." if n > 64 else "")
