"""A tiny GPT-OSS as transformers saves it, with every part of it large enough to be missed."""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 6,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def tiny_gpt_oss(seed: int = 0, **changes: Any) -> Any:
    """The module in float32. Biases, sinks and norms are not the zeros and ones of its birth, and
    the experts' activations reach their clamp.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = GptOssForCausalLM(GptOssConfig(**{**SIZES, **changes})).float()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "experts.gate_up" in name:
                parameter.normal_(0.0, 1.0)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
            else:
                parameter.normal_(0.0, 0.2)
    return model.eval()


def save_gpt_oss(folder: Path, seed: int = 0, **changes: Any) -> Path:
    tiny_gpt_oss(seed, **changes).save_pretrained(folder)
    return folder
