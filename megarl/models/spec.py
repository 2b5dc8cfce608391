"""The dimensions of a model under neutral names, whatever its family calls them.

``read_spec`` takes them from Hugging Face's config.json by the family's reader
(``config_json.py``); a family is one module and a line of ``FAMILIES``.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from megarl.errors import DataError, Problem
from megarl.models.config_json import ConfigReader
from megarl.models.parts import DeltaNet, Llama3, Mla, Yarn

FAMILIES: dict[str, str] = {  # model_type in config.json -> module with `read` and `rules`
    "deepseek_v3": "megarl.models.deepseek_v3",
    "glm4_moe": "megarl.models.glm4_moe",
    "gpt_oss": "megarl.models.gpt_oss",
    "kimi_k2": "megarl.models.deepseek_v3",  # the same model in other sizes
    "llama": "megarl.models.llama",
    "mistral": "megarl.models.mistral",
    "qwen2": "megarl.models.qwen2",
    "qwen3": "megarl.models.qwen3",
    "qwen3_moe": "megarl.models.qwen3_moe",
}
REFUSED: dict[str, str] = {  # model_type -> why it cannot be trained (docs/model-families.md)
    "qwen3_next": "megatron-core 0.19.2 computes gated delta nets of packed sequences with the GPU "
    "kernels of flash-linear-attention alone",
}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder's dimensions. Fields with a default are what only some families have.

    Example (Qwen3-30B-A3B): ``hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144,
    moe_ffn=768, experts=128, topk=8, vocab=151936, moe_layers=(True,) * 48``.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of dense layers
    moe_ffn: int  # of one expert; 0 without experts
    experts: int  # 0 without experts
    topk: int  # experts a token is routed to; 0 without experts
    vocab: int  # rows of the embedding, without any padding of ours
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    norm_topk_prob: bool  # gate weights of the chosen experts are scaled to sum to 1
    moe_layers: tuple[bool, ...]  # [layers], True where the layer has experts
    router_score: str  # softmax or sigmoid
    max_positions: int
    dtype: str  # of the stored weights: float32 or bfloat16
    eos_ids: tuple[int, ...]  # ids that end a response, config.json's first
    # rotary embedding
    rope_share: float = 1.0  # share of a head's dimensions that is turned, the first ones
    yarn: Yarn | None = None
    llama3: Llama3 | None = None
    # attention
    qkv_bias: bool = False
    out_bias: bool = False  # of the output projection
    sinks: bool = False  # a learnt logit per head that takes part in the softmax alone
    windows: tuple[int, ...] = ()  # [layers] tokens a query sees, itself included; 0: all. (): all
    output_gate: bool = False  # attention's output is gated by a sigmoid of its input
    mla: Mla | None = None
    delta_net: DeltaNet | None = None
    linear_layers: tuple[bool, ...] = ()  # [layers], True where ``delta_net`` is the attention
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    # experts
    routed_scale: float = 1.0  # of the chosen experts' gate weights
    router_groups: int = 1  # experts are chosen among the best ``router_topk_groups`` groups
    router_topk_groups: int = 1
    expert_bias: bool = False  # a buffer that moves the choice and not the gate weights
    router_bias: bool = False  # a parameter of the router's projection
    shared_ffn: int = 0  # width of the shared experts together; 0: none
    shared_gate: bool = False  # their output is gated by a sigmoid
    # feed-forward
    mlp_bias: bool = False  # of the experts' matrices
    glu_alpha: float = 0.0  # clamped SwiGLU: gate * sigmoid(alpha * gate) * (up + 1); 0: SwiGLU
    glu_limit: float = 0.0  # and its clamp
    mtp_layers: int = 0  # multi-token prediction layers behind the last

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ModelSpec":
        """The inverse of ``as_json``, also after a trip through JSON (lists for tuples) and of a
        spec that was stored when fields with a default did not exist yet.
        """
        fields = {f.name: f for f in dataclasses.fields(ModelSpec)}
        needed = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
        wrong = (set(value) - set(fields)) | (needed - set(value))
        if wrong:
            raise DataError(f"a stored model spec has other fields: {sorted(wrong)}")
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in value.items()
        }
        for name, part in _PARTS.items():
            if plain.get(name) is not None:
                plain[name] = part(**plain[name])
        return ModelSpec(**plain)

    def differences(self, other: "ModelSpec") -> list[Problem]:
        """Every dimension in which two descriptions of one model disagree, with both values.

        ``dtype`` and ``eos_ids`` are left out: they do not change what the weights compute.
        """
        mine, theirs = self.as_json(), other.as_json()
        names = [n for n in mine if n not in ("dtype", "eos_ids") and mine[n] != theirs[n]]
        return [Problem(name, str(mine[name]), str(theirs[name])) for name in names]


_PARTS: dict[str, type] = {"yarn": Yarn, "llama3": Llama3, "mla": Mla, "delta_net": DeltaNet}


class FamilyReader(Protocol):
    def __call__(self, config: ConfigReader) -> ModelSpec: ...


_REWARD_MODEL = "ForSequenceClassification"


def read_spec(hf_dir: Path, *, for_values: bool = False) -> ModelSpec:
    """Read and check ``config.json`` (and the end tokens of ``generation_config.json``).
    ``for_values``: of a model below a value head, which a reward model of a family is as well as
    its language model.

    Raises DataError listing every unsupported or contradictory value, not only the first.
    """
    config = ConfigReader.of_folder(Path(hf_dir))
    match config.values.get("architectures"):
        case [str(name)] if for_values and name.endswith(_REWARD_MODEL):
            language_model = name.removesuffix(_REWARD_MODEL) + "ForCausalLM"
            config.values = {**config.values, "architectures": [language_model]}
    return spec_of(config)


def spec_of(config: ConfigReader) -> ModelSpec:
    """``read_spec`` of values that are at hand."""
    family = config.values.get("model_type")
    if family not in FAMILIES:
        why = f" ({family}: {REFUSED[family]})" if family in REFUSED else ""
        accepted = f"one of {', '.join(sorted(FAMILIES))}{why}"
        raise DataError(str(Problem(f"{config.where}: model_type", repr(family), accepted)))
    read = cast(FamilyReader, importlib.import_module(FAMILIES[family]).read)
    spec = read(config)
    config.raise_problems()
    return spec
