"""Hugging Face's config.json, read key by key.

A family's reader names every key whose value would change the computation. What is not supported
is refused with its key, the value found and the values accepted: a model that converts but trains
with, say, a wrong rotary base looks healthy for weeks.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import DataError, Problem
from megarl.models.hf_fp8 import KEY, quantization_problems
from megarl.models.parts import Llama3, Yarn

HARMLESS: dict[str, tuple[object, ...]] = {  # key -> values that change nothing of what is computed
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_output_gate": (False,),
    "use_qk_norm": (True,),
    "attention_dropout": (0, 0.0),
    "num_nextn_predict_layers": (0,),
}
_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_OF_EVERY_BLOCK = ("rope_theta", "partial_rotary_factor", "rope_type", "type")


class ConfigReader:
    """A config.json that collects complaints while it is read: a getter records one and goes on."""

    def __init__(
        self, values: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None
    ) -> None:
        """``where``: what messages call it. ``generation``: generation_config.json's values."""
        self.values, self.where, self.generation = values, where, generation or {}
        self.problems: list[Problem] = []

    @staticmethod
    def of_folder(hf_dir: Path) -> "ConfigReader":
        path, generation = hf_dir / "config.json", hf_dir / "generation_config.json"
        values = read_object(path)
        return ConfigReader(
            values, str(path), read_object(generation) if generation.exists() else None
        )

    def complain(self, key: str, found: object, accepted: str) -> None:
        self.problems.append(Problem(key, repr(found), accepted))

    def raise_problems(self) -> None:
        if self.problems:
            raise DataError("\n".join([f"{self.where} cannot be used:", *map(str, self.problems)]))

    def count(self, key: str, *aliases: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``; a value present under several keys must agree."""
        found = {k: self.values[k] for k in (key, *aliases) if self.values.get(k) is not None}
        if not found and default is not None:
            return default
        value = next(iter(found.values()), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.complain(key, value, f"an integer of at least {least}")
            return least
        if any(v != value for v in found.values()):
            self.complain(" and ".join(found), list(found.values()), "equal values")
        return value

    def number(self, key: str) -> float:
        return self.check_number(key, self.values.get(key))

    def check_number(self, key: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.complain(key, value, "a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.complain(key, value, "true or false")
            return default
        return value

    def only(self, key: str, *accepted: object) -> None:
        """Refuse a present key unless its value is one of the harmless ones (None always is)."""
        value = self.values.get(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in accepted):
            self.complain(key, value, " or ".join(json.dumps(a) for a in (*accepted, None)))

    def architecture(self, name: str) -> None:
        """Refuse a classifier, a reward model or a wrapper of the same family."""
        found = self.values.get("architectures")
        if found is not None and found != [name]:
            self.complain("architectures", found, repr([name]))

    def transformer(
        self,
        layers: int,
        *,
        head_dim: int | None = None,
        rope_share: float | None = None,
        rope_theta: float = 10000.0,
        kv_heads: int | None = None,
        scalings: Collection[str] = ("yarn",),
        reads: Collection[str] = (),
    ) -> dict[str, Any]:
        """The fields of ModelSpec that every decoder family here reads alike; refuses the rest.

        ``head_dim``: what transformers takes when the key is absent; None where it must be there.
        ``rope_theta``, ``kv_heads``: likewise. ``scalings``: kinds of rotary scaling besides none.
        ``rope_share``: as ``head_dim``, of ``partial_rotary_factor``; None where the family turns
        whole heads. ``reads``: keys of ``HARMLESS``, or layer_types, that the family reads itself.
        """
        for key, accepted in HARMLESS.items():
            if key not in reads:
                self.only(key, *accepted)
        if KEY not in reads:
            self.problems += quantization_problems(self.values)
        if "layer_types" not in reads:
            self._all_layers_alike(layers)
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", default=kv_heads)
        if heads % kv_heads:
            accepted_heads = f"a divisor of num_attention_heads={heads}"
            self.complain("num_key_value_heads", kv_heads, accepted_heads)
        size = self.count("head_dim", default=head_dim)
        vocab = self.count("vocab_size")
        return {
            "hidden": self.count("hidden_size"),
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": size,
            "vocab": vocab,
            **self.rotary(size, rope_share, rope_theta, scalings),
            "norm_eps": self.number("rms_norm_eps"),
            "tie_embeddings": self.flag("tie_word_embeddings", default=False),
            "qk_norm": True,
            "router_score": "softmax",
            "max_positions": self.count("max_position_embeddings"),
            "dtype": self.dtype(),
            "eos_ids": self.eos_ids(vocab),
        }

    def _all_layers_alike(self, layers: int) -> None:
        kinds = self.values.get("layer_types")
        if kinds is not None and kinds != ["full_attention"] * layers:
            self.complain("layer_types", kinds, f"num_hidden_layers={layers} times full_attention")

    def rotary(
        self,
        size: int,
        share: float | None = None,
        default_theta: float = 10000.0,
        scalings: Collection[str] = ("yarn",),
    ) -> dict[str, Any]:
        """``rope_theta``, ``rope_share``, ``yarn`` and ``llama3`` of a head of ``size`` dimensions.

        Read from the new key (rope_parameters) or the old ones; contradictory values are refused,
        and so is every scaling but those of ``scalings``. ``share``: as ``transformer``'s
        ``rope_share``.
        """
        blocks = {key: self._rope_block(key) for key in ("rope_parameters", "rope_scaling")}
        theta = self._rope_value("rope_theta", default_theta, blocks)
        found = self._rope_value("partial_rotary_factor", share or 1.0, blocks)
        if found != 1 and (share is None or found > 1):
            self.complain("partial_rotary_factor", found, "1" if share is None else "at most 1")
        elif int(size * found) % 2:
            self.complain("head_dim", size, "an even number (rotary embedding turns pairs)")
        scaled = [(key, block) for key, block in blocks.items() if _kind(block) != "default"]
        found_scaling: dict[str, Yarn | Llama3 | None] = {"yarn": None, "llama3": None}
        read: dict[str, Callable[[str, Mapping[str, Any]], Yarn | Llama3]]
        read = {"yarn": self._yarn, "llama3": self._llama3}
        for key, block in scaled:
            kind = _kind(block)
            if kind not in scalings:
                accepted = " or ".join(("default", *scalings))
                self.complain(f"{key}.{_kind_key(block)}", kind, accepted)
            else:
                found_scaling[kind] = read[kind](key, block)
        if len(scaled) == 2 and blocks["rope_parameters"] != blocks["rope_scaling"]:
            self.complain(" and ".join(blocks), list(blocks.values()), "one of them")
        return {
            "rope_theta": theta,
            "rope_share": found,
            **found_scaling,
        }

    def _yarn(self, key: str, block: Mapping[str, Any]) -> Yarn:
        self._known(key, block, _YARN)
        values = {name: block.get(name) for name in _YARN}
        factor = self.check_number(f"{key}.factor", values["factor"])
        # transformers takes these two into account together or not at all
        scale, scale_all = (
            self.check_number(f"{key}.{name}", values[name]) if values[name] else 0.0
            for name in ("mscale", "mscale_all_dim")
        )
        if bool(scale) != bool(scale_all):
            found = [values["mscale"], values["mscale_all_dim"]]
            self.complain(f"{key}.mscale and mscale_all_dim", found, "both or none of them")
        scale = scale if scale_all else 1.0
        of_cos = _mscale(factor, scale) / _mscale(factor, scale_all)
        said = values["attention_factor"]
        if said is not None and not math.isclose(_as_number(said), of_cos, rel_tol=1e-6):
            self.complain(f"{key}.attention_factor", said, f"{of_cos:g}, which the rest implies")
        truncate = values["truncate"]
        positions = values["original_max_position_embeddings"]
        return Yarn(
            factor=factor,
            original_positions=int(
                self.check_number(f"{key}.original_max_position_embeddings", positions)
            ),
            beta_fast=self.check_number(f"{key}.beta_fast", values["beta_fast"] or 32),
            beta_slow=self.check_number(f"{key}.beta_slow", values["beta_slow"] or 1),
            mscale=float(scale),
            mscale_all_dim=float(scale_all),
            truncate=True if truncate is None else bool(truncate),
        )

    def _llama3(self, key: str, block: Mapping[str, Any]) -> Llama3:
        self._known(key, block, _LLAMA3)
        factor, low, high, positions = (
            self.check_number(f"{key}.{name}", block.get(name)) for name in _LLAMA3
        )
        if low >= high and not self.problems:
            names = f"{key}.low_freq_factor and high_freq_factor"
            self.complain(names, [low, high], "the second above the first")
        return Llama3(factor, low, high, int(positions))

    def _known(self, key: str, block: Mapping[str, Any], names: Collection[str]) -> None:
        known = {*names, *_OF_EVERY_BLOCK}
        for name in sorted(set(block) - known):
            self.complain(f"{key}.{name}", block[name], f"one of {', '.join(sorted(known))}")

    def _rope_block(self, key: str) -> Mapping[str, Any]:
        block = self.values.get(key) or {}
        if not isinstance(block, dict):
            self.complain(key, block, "an object or null")
            return {}
        kinds = [block[name] for name in ("rope_type", "type") if block.get(name) is not None]
        if len(kinds) == 2 and kinds[0] != kinds[1]:
            self.complain(f"{key}.rope_type and {key}.type", kinds, "equal values")
        if _kind(block) == "default":
            for name, value in block.items():
                if name not in _OF_EVERY_BLOCK:
                    self.complain(f"{key}.{name}", value, "plain rotary embedding")
        return block

    def _rope_value(
        self, name: str, default: float, blocks: Mapping[str, Mapping[str, Any]]
    ) -> float:
        places = {name: self.values, **{f"{key}.{name}": b for key, b in blocks.items()}}
        found = {k: v[name] for k, v in places.items() if v.get(name) is not None}
        if len(set(map(repr, map(_as_float, found.values())))) > 1:
            self.complain(" and ".join(found), list(found.values()), "equal values")
        key, value = next(iter(found.items()), (name, default))
        return self.check_number(key, value)

    def dtype(self) -> str:
        """``dtype`` (older files: ``torch_dtype``) of the stored weights."""
        found = {k: self.values[k] for k in ("dtype", "torch_dtype") if self.values.get(k)}
        value = next(iter(found.values()), "float32")
        if value not in ("float32", "bfloat16") or any(v != value for v in found.values()):
            values = list(found.values())
            shown = value if len(values) == 1 else values
            self.complain(" and ".join(found), shown, "float32 or bfloat16")
            return "float32"
        return str(value)

    def eos_ids(self, vocab: int) -> tuple[int, ...]:
        """End tokens of both files together, as the inference servers take them."""
        ids: list[int] = []
        files = (("config.json", self.values), ("generation_config.json", self.generation))
        for name, source in files:
            value = source.get("eos_token_id")
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                    key = f"eos_token_id ({name})"
                    self.complain(key, token, f"token ids below vocab_size={vocab}")
                elif token not in ids:
                    ids.append(token)
        if not ids and not self.problems:
            self.complain("eos_token_id", None, "a token id: without it no response ends")
        return tuple(ids)


def _kind_key(block: Mapping[str, Any]) -> str:
    return "rope_type" if block.get("rope_type") is not None else "type"


def _kind(block: Mapping[str, Any]) -> str:
    return str(block.get(_kind_key(block)) or "default")


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _as_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int | float) else value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises DataError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise DataError(f"{path} does not exist; expected a Hugging Face model folder") from e
    except (OSError, ValueError) as e:
        raise DataError(f"{path} is not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
