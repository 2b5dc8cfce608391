"""Stands in for `sgl_kernel`, SGLang's package of compiled kernels, which exists only for GPUs (and
for CPUs with AMX). SGLang imports it unconditionally but falls back to its own plain-torch layers
where AMX kernels are absent, so serving on CPU needs exactly one function from it.

Do not register anything under `torch.ops.sgl_kernel`: SGLang takes that for the AMX kernels.
"""

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """For each request r in turn: the next `end - start` entries of out_cache_loc [n] go to
    req_to_token [requests, pool_len] at row r, columns start..end."""
    taken = 0
    for i, row in enumerate(req_pool_indices.tolist()):
        start, end = int(start_offset[i]), int(end_offset[i])
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str):
    """Speculative-decoding and Mamba kernels are imported by name, and never called here."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
