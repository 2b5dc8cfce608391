"""What upstream's gated delta net, the linear attention of Qwen3-Next, says on this machine."""

from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import common
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.actor.attention_packed import RMSNorm, packed_seq_params
from megarl.actor.setup import init_parallel
from megarl.mesh import Mesh


def complaints(rank: int) -> dict[str, str]:
    """What is raised: by building it; and, past that check, by its path in plain torch, for packed
    rows and for one sequence; and by that path's kernel when it is given bounds of sequences.
    """
    init_parallel(Mesh(), seed=1, timeout_s=60)
    row = torch.zeros(8, 1, 32)
    q, g = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    try:
        found = {"built": _raised(_build)}
        with mock.patch.object(common, "HAVE_FLA", True):
            layer = _build()
        packing = packed_seq_params(bounds)
        found["packed"] = _raised(lambda: layer(row, None, packed_seq_params=packing))
        found["alone"] = _raised(lambda: layer(row, None))
        rule = gated_delta_net.torch_chunk_gated_delta_rule
        found["kernel"] = _raised(lambda: rule(q, q, q, g, g, cu_seqlens=bounds))
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _raised(what: object) -> str:
    assert callable(what)
    try:
        what()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def _build() -> gated_delta_net.GatedDeltaNet:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        activation_func=torch.nn.functional.silu,
        deterministic_mode=True,  # the path in plain torch
        use_cpu_initialization=True,
    )
    return gated_delta_net.GatedDeltaNet(
        config,
        gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear
        ),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
