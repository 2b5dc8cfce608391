"""An SGLang plugin with the little that SGLang 0.5.23 lacks on a CPU without AMX.

SGLang finds it by the entry point in the dist-info folder beside this file, which must therefore be
on PYTHONPATH; it calls `activate` in each of its processes, before any model is built. Everything
goes through SGLang's own hook registry, except for one entry in a table of allocators.

1. Routed experts are collected in a host buffer that SGLang pins with CUDA: plain memory instead.
2. With expert parallelism a rank marks the experts of others by id -1; SGLang's native experts
   forward indexes with it: leave those out.
3. Block-FP8 layers insist on AMX kernels: compute from dequantised weights. The weights stay as
   they were loaded (float8_e4m3fn and weight_scale_inv), so that checkpoint names, shapes, slicing
   over tensor-parallel ranks and weight updates run through SGLang's own loaders. What is not real
   is the arithmetic: activations are not quantised.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F


def activate() -> None:
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import cpu_has_amx_support

    common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    layers = "sglang.srt.layers"
    HookRegistry.register(
        f"{layers}.moe.fused_moe_native.moe_forward_native", _local_experts, HookType.AROUND
    )
    if cpu_has_amx_support():
        return
    fp8 = f"{layers}.quantization.fp8"
    for method, apply in (("Fp8LinearMethod", _fp8_linear), ("Fp8MoEMethod", _fp8_experts)):
        HookRegistry.register(f"{fp8}.{method}.apply", apply, HookType.AROUND)
        HookRegistry.register(
            f"{fp8}.{method}.process_weights_after_loading_block_quant",
            lambda self, layer: None,
            HookType.REPLACE,
        )
    HookRegistry.register(
        f"{fp8}.Fp8Config.get_supported_act_dtypes",
        lambda cls: [torch.bfloat16, torch.half, torch.float32],
        HookType.REPLACE,
    )


def _plain_memory(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return torch.empty(dims, dtype=dtype, device=device)


def _local_experts(native, layer, x, topk_output, config):
    """x [T, H], topk weights and ids [T, K] with -1 for experts that live on another rank."""
    weights, ids = topk_output.topk_weights, topk_output.topk_ids
    if not (ids < 0).any():
        return native(layer, x, topk_output, config)
    assert config.activation == "silu" and config.gemm1_alpha is None, config
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, layer.w2_weight[expert]).float()
            out.index_add_(0, token, y * weights[token, slot, None].float())
    return out.to(x.dtype)


def _dequantise(codes, scales, block_size, dtype):
    """codes [..., N, K] float8, scales [..., ceil(N/b), ceil(K/b)] -> [..., N, K]."""
    n, k = codes.shape[-2:]
    rows, columns = block_size
    scales = scales.repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(columns, -1)[..., :k]
    return (codes.float() * scales.float()).to(dtype)


def _fp8_linear(apply, self, layer, x, bias=None):
    if not self.block_quant:
        return apply(self, layer, x, bias)
    block = self.quant_config.weight_block_size
    return F.linear(x, _dequantise(layer.weight, layer.weight_scale_inv, block, x.dtype), bias)


def _fp8_experts(apply, self, layer, dispatch_output):
    if not self.block_quant:
        return apply(self, layer, dispatch_output)
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    block = self.quant_config.weight_block_size
    x = dispatch_output.hidden_states
    plain = SimpleNamespace(
        num_experts=layer.w13_weight.shape[0],
        w13_weight=_dequantise(layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype),
        w2_weight=_dequantise(layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype),
    )
    y = fused_moe_native.moe_forward_native(
        plain, x, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=y)
