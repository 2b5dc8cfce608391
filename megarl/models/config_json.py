"""Hugging Face's config.json, read key by key.

A family's reader names every key whose value would change the computation. What is not supported
is refused with its key, the value found and the values accepted: a model that converts but trains
with, say, a wrong rotary base looks healthy for weeks.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import DataError, Problem


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
        values = _read_object(path)
        return ConfigReader(
            values, str(path), _read_object(generation) if generation.exists() else None
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

    def transformer(self, layers: int, head_dim: int | None = None) -> dict[str, Any]:
        """The fields of ModelSpec that every decoder family here reads alike; refuses the rest.

        ``head_dim``: what transformers takes when the key is absent; None where it must be there.
        """
        self._refuse_unsupported(layers)
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads")
        if heads % kv_heads:
            accepted = f"a divisor of num_attention_heads={heads}"
            self.complain("num_key_value_heads", kv_heads, accepted)
        size = self.count("head_dim", default=head_dim)
        if size % 2:
            self.complain("head_dim", size, "an even number (rotary embedding turns pairs)")
        vocab = self.count("vocab_size")
        return {
            "hidden": self.count("hidden_size"),
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": size,
            "vocab": vocab,
            "rope_theta": self.rope_theta(default=10000.0),
            "norm_eps": self.number("rms_norm_eps"),
            "tie_embeddings": self.flag("tie_word_embeddings", default=False),
            "qk_norm": True,
            "router_score": "softmax",
            "max_positions": self.count("max_position_embeddings"),
            "dtype": self.dtype(),
            "eos_ids": self.eos_ids(vocab),
        }

    def _refuse_unsupported(self, layers: int) -> None:
        self.only("hidden_act", "silu")
        for key in ("attention_bias", "qkv_bias", "mlp_bias"):
            self.only(key, False)
        for key in ("use_sliding_window", "attn_output_gate"):
            self.only(key, False)
        self.only("use_qk_norm", True)
        self.only("attention_dropout", 0, 0.0)
        self.only("num_nextn_predict_layers", 0)
        self.only("quantization_config")
        kinds = self.values.get("layer_types")
        if kinds is not None and kinds != ["full_attention"] * layers:
            self.complain("layer_types", kinds, f"num_hidden_layers={layers} times full_attention")

    def rope_theta(self, default: float) -> float:
        """The rotary base from the new key (rope_parameters) or the old; nothing else may be on.

        Refused: scaling of any kind (yarn, linear, ...), rotation of a part of the head, and two
        different bases. ``default`` is what transformers takes when neither key is there.
        """
        bases: dict[str, object] = {}
        if self.values.get("rope_theta") is not None:
            bases["rope_theta"] = self.values["rope_theta"]
        for key in ("rope_parameters", "rope_scaling"):
            block = self.values.get(key)
            if block is None:
                continue
            if not isinstance(block, dict):
                self.complain(key, block, "an object or null")
                continue
            for name, value in block.items():
                if name == "rope_theta" and value is not None:
                    bases[f"{key}.rope_theta"] = value
                elif not _plain_rope(name, value):
                    self.complain(f"{key}.{name}", value, "plain rotary embedding")
        self.only("partial_rotary_factor", 1.0, 1)
        if len(set(map(repr, map(_as_float, bases.values())))) > 1:
            self.complain(" and ".join(bases), list(bases.values()), "equal values")
        key, value = next(iter(bases.items()), ("rope_theta", default))
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


def _plain_rope(name: str, value: object) -> bool:
    if name in ("rope_type", "type"):
        return value in (None, "default")
    return name == "partial_rotary_factor" and value in (None, 1, 1.0)


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int | float) else value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise DataError(f"{path} does not exist; expected a Hugging Face model folder") from e
    except (OSError, ValueError) as e:
        raise DataError(f"{path} is not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
