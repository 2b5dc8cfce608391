"""The generated model of bench_sync.py: a Qwen3-MoE of random weights."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec

SIZES = {  # option -> (default, key of config.json): 1.4 GB in bf16
    "hidden": (2048, "hidden_size"),
    "layers": (4, "num_hidden_layers"),
    "heads": (16, "num_attention_heads"),
    "kv-heads": (4, "num_key_value_heads"),
    "head-dim": (128, "head_dim"),
    "experts": (32, "num_experts"),
    "topk": (4, "num_experts_per_tok"),
    "moe-ffn": (768, "moe_intermediate_size"),
    "vocab": (8192, "vocab_size"),
}
_PRIME = 97  # tensors begin at so many places of one random array


def generate(folder: Path, sizes: Mapping[str, int]) -> Path:
    """A Hugging Face folder in bf16. Tensors repeat each other's numbers from elsewhere on, which
    is quicker than to draw them all.
    """
    source = folder / "source"
    source.mkdir(parents=True)
    values: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **{SIZES[name][1]: size for name, size in sizes.items()},
        "intermediate_size": 2 * sizes["hidden"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    (source / "config.json").write_text(json.dumps(values))
    specs = mapping_for(read_spec(source)).hf_spec()
    longest = max(math.prod(spec.shape) for spec in specs)
    random = 0.02 * torch.randn(longest + _PRIME, generator=torch.Generator().manual_seed(0))
    random = random.bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for k, spec in enumerate(specs):
            numbers = random[k % _PRIME :][: math.prod(spec.shape)]
            yield spec.name, numbers.view(spec.shape) if len(spec.shape) > 1 else 1 + numbers

    write_checkpoint(folder / "model", tensors(), specs, source)
    return folder / "model"
