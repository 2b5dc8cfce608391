"""HF -> Megatron -> HF is the identity in every layout, and each row lies where it belongs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.mapping import ModelMapping, layout_problems, mapping_for, padded_vocab_size
from megarl.models.spec import ModelSpec, read_spec

Saved = Callable[[str], Path]
MODELS = (
    "moe",
    "moe_with_dense_layers",
    "moe_every_second_layer",
    "moe_tied",
    "moe_bfloat16",
    "dense",
    "dense_tied",
    "deepseek_v3",
    "deepseek_v3 in bf16",
    "deepseek_v3 direct queries",
    "glm4_moe",
    "glm4_moe in bf16",
    "glm4_moe without qk norm",
    "gpt_oss",
    "gpt_oss in bf16",
    "gpt_oss without yarn",
    "qwen2",
    "qwen2 in bf16",
    "qwen2 windows tied",
    "llama",
    "llama in bf16",
    "llama biases tied",
    "mistral",
    "kimi_k2",
    "kimi_k2 in bf16",
)
LAYER = "decoder.layers.1."


def spec_of(heads: int = 8, kv_heads: int = 2, vocab: int = 50, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        family="qwen3_moe",
        hidden=16,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        ffn=24,
        moe_ffn=12,
        experts=8,
        topk=2,
        vocab=vocab,
        rope_theta=1e4,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qk_norm=True,
        norm_topk_prob=True,
        moe_layers=(True, True),
        router_score="softmax",
        max_positions=64,
        dtype="float32",
        eos_ids=(1,),
    )


def rows_of(ids: Sequence[float], width: int) -> Tensor:
    """[len(ids), width], every entry of a row its id."""
    return torch.tensor(ids, dtype=torch.float32)[:, None].repeat(1, width)


def head_rows(first: int, heads: int, head_dim: int, width: int) -> Tensor:
    """A projection whose every row equals the id of its head, counted from ``first``."""
    return rows_of([first + h for h in range(heads) for _ in range(head_dim)], width)


def shards_of(mapping: ModelMapping, name: str, full: Sequence[Tensor], size: int) -> list[Tensor]:
    return [mapping.to_megatron(name, full, rank, size) for rank in range(size)]


def round_trip(
    mapping: ModelMapping, tensors: dict[str, Tensor], tp: int, etp: int
) -> Iterator[tuple[str, Tensor]]:
    stacks: dict[str, list[Tensor]] = {}
    for name in mapping.megatron_names():
        index = mapping.slice_of(name)
        whole = [tensors[hf] for hf in mapping.hf_names(name)]
        full = whole if index is None else [t[index] for t in whole]
        size = etp if mapping.is_expert(name) else tp
        shards = shards_of(mapping, name, full, size)
        back = mapping.to_hf(name, shards if mapping.is_sharded(name) else shards[-1:])
        if index is None:
            yield from back
            continue
        for hf, entry in back:
            stacks.setdefault(hf, []).append(entry)
            assert entry.is_contiguous() and len(stacks[hf]) == index + 1
    yield from ((hf, torch.stack(entries)) for hf, entries in stacks.items())


@pytest.mark.parametrize("model", MODELS)
def test_hf_spec_is_what_transformers_saves(saved: Saved, model: str) -> None:
    folder = saved(model)
    tensors = load_file(folder / "model.safetensors")
    found = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    spec = mapping_for(read_spec(folder)).hf_spec()
    assert len({t.name for t in spec}) == len(spec)
    assert {t.name: (t.shape, t.dtype) for t in spec} == found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 1), (2, 2), (4, 4), (1, 2)])
def test_hf_to_megatron_to_hf_is_bitwise(saved: Saved, model: str, tp: int, etp: int) -> None:
    folder = saved(model)
    tensors = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    mapping = mapping_for(spec, padded_vocab_size(spec.vocab, 64))
    back = list(round_trip(mapping, tensors, tp, etp))
    assert sorted(name for name, _ in back) == sorted(tensors)  # each once, none dropped
    for name, tensor in back:
        assert tensor.dtype == tensors[name].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 8), (8, 1), (6, 3), (4, 4)])
def test_each_row_of_linear_qkv_is_of_its_head(heads: int, kv_heads: int) -> None:
    """Query heads are 0.., key heads 100.., value heads 200..; a group is [queries, key, value]."""
    spec = spec_of(heads, kv_heads)
    mapping = mapping_for(spec)
    parts = [
        head_rows(first, count, spec.head_dim, spec.hidden)
        for first, count in ((0, heads), (100, kv_heads), (200, kv_heads))
    ]
    name = LAYER + "self_attention.linear_qkv.weight"
    per_group = heads // kv_heads
    order = [
        head
        for group in range(kv_heads)
        for head in [*range(group * per_group, (group + 1) * per_group), 100 + group, 200 + group]
    ]
    for size in (n for n in (1, 2, 3, 4, 8) if kv_heads % n == 0):
        shards = shards_of(mapping, name, parts, size)
        share = len(order) // size
        for rank, shard in enumerate(shards):
            mine = order[rank * share : (rank + 1) * share]
            ids = [head for head in mine for _ in range(spec.head_dim)]
            assert torch.equal(shard, rows_of(ids, spec.hidden)), (size, rank)
        for (hf, tensor), part in zip(mapping.to_hf(name, shards), parts, strict=True):
            assert torch.equal(tensor, part), (size, hf)


@pytest.mark.parametrize("tp", [2, 4])
def test_fewer_kv_heads_than_ranks_are_refused(tp: int) -> None:
    spec = spec_of(heads=8, kv_heads=1 if tp == 2 else 2)
    kv = spec.kv_heads
    name = LAYER + "self_attention.linear_qkv.weight"
    parts = [torch.zeros(n * spec.head_dim, spec.hidden) for n in (8, kv, kv)]
    with pytest.raises(DataError, match=rf"linear_qkv.*{kv} heads .* size {tp}"):
        mapping_for(spec).to_megatron(name, parts, 0, tp)
    problems = layout_problems(spec, tp=tp, etp=1)
    assert [(p.key, p.found, p.accepted) for p in problems] == [
        ("parallel.tp", str(tp), f"a divisor of num_key_value_heads={kv}")
    ]


def test_layout_problems_lists_all_of_them() -> None:
    problems = [str(p) for p in layout_problems(spec_of(heads=8, kv_heads=2), tp=16, etp=5)]
    assert len(problems) == 3
    assert "num_attention_heads=8" in problems[0]
    assert "num_key_value_heads=2" in problems[1]
    assert "moe_intermediate_size=12" in problems[2]
    assert layout_problems(spec_of(), tp=2, etp=4) == []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_shard_of_fc1_is_its_gate_rows_and_its_up_rows(size: int) -> None:
    spec = spec_of()
    gate, up = rows_of(range(12), 16), rows_of(range(100, 112), 16)
    name = LAYER + "mlp.experts.local_experts.5.linear_fc1.weight"
    mapping = mapping_for(spec)
    shards = shards_of(mapping, name, [gate, up], size)
    share = 12 // size
    for rank, shard in enumerate(shards):
        mine = range(rank * share, (rank + 1) * share)
        assert torch.equal(shard, rows_of([*mine, *(100 + i for i in mine)], 16))
    (_, gate_back), (_, up_back) = mapping.to_hf(name, shards)
    assert torch.equal(gate_back, gate)
    assert torch.equal(up_back, up)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("self_attention.linear_proj.weight", (16, 32)), ("mlp.experts.linear_fc2.weight3", (16, 12))],
)
def test_row_parallel_weights_are_split_by_input_features(
    name: str, shape: tuple[int, int]
) -> None:
    columns = torch.arange(shape[1], dtype=torch.float32).repeat(shape[0], 1)
    mapping = mapping_for(spec_of())
    left, right = shards_of(mapping, LAYER + name, [columns], 2)
    half = shape[1] // 2
    assert left.tolist() == [list(range(half))] * shape[0]
    assert right.tolist() == [list(range(half, shape[1]))] * shape[0]
    ((_, back),) = mapping.to_hf(LAYER + name, [left, right])
    assert torch.equal(back, columns)


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_vocabulary_padding_is_zero_and_never_exported(name: str) -> None:
    """D1: 1,000 words, 8 ranks, rows a multiple of 128: 1,024 in Megatron, 1,000 outside."""
    spec = spec_of(vocab=1000)
    padded = padded_vocab_size(1000, 128)
    assert padded == 1024
    mapping = mapping_for(spec, padded)
    rows = rows_of(range(1, 1001), 16)
    shards = shards_of(mapping, name, [rows], 8)
    assert [len(s) for s in shards] == [128] * 8
    assert torch.equal(torch.cat(shards)[:1000], rows)
    assert torch.equal(shards[-1][-24:], torch.zeros(24, 16))
    trained = [shard + 1 for shard in shards]  # padding rows may drift in training
    ((_, back),) = mapping.to_hf(name, trained)
    assert torch.equal(back, rows + 1)


def test_tied_output_layer_reads_the_embedding_and_is_not_exported() -> None:
    tied, untied = mapping_for(spec_of(tied=True)), mapping_for(spec_of(tied=False))
    assert tied.hf_names("output_layer.weight") == ("model.embed_tokens.weight",)
    assert tied.exported("output_layer.weight") == []
    assert tied.to_hf("output_layer.weight", [torch.zeros(50, 16)]) == []
    assert "lm_head.weight" not in [t.name for t in tied.hf_spec()]
    assert untied.hf_names("output_layer.weight") == ("lm_head.weight",)
    assert untied.exported("output_layer.weight") == [("lm_head.weight", (50, 16))]
    assert "lm_head.weight" in [t.name for t in untied.hf_spec()]


def test_every_expert_keeps_its_global_number_in_both_spellings() -> None:
    """D8: each expert is filled with its id, and comes out under that id."""
    mapping = mapping_for(spec_of())
    for layer in range(2):
        for expert in range(8):
            for spelling in ("local_experts.{}.linear_fc2.weight", "linear_fc2.weight{}"):
                name = f"decoder.layers.{layer}.mlp.experts.{spelling.format(expert)}"
                assert mapping.is_expert(name)
                shards = shards_of(mapping, name, [torch.full((16, 12), float(expert))], 2)
                ((hf, tensor),) = mapping.to_hf(name, shards)
                assert hf == f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
                assert torch.equal(tensor, torch.full((16, 12), float(expert)))


@pytest.mark.parametrize(
    ("local", "transformer_engine"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.experts.local_experts.7.linear_fc1.weight", "mlp.experts.linear_fc1.weight7"),
        ("mlp.experts.local_experts.7.linear_fc2.weight", "mlp.experts.linear_fc2.weight7"),
    ],
)
def test_both_megatron_spellings_mean_the_same_tensors(local: str, transformer_engine: str) -> None:
    mapping = mapping_for(spec_of())
    assert mapping.hf_names(LAYER + local) == mapping.hf_names(LAYER + transformer_engine)
    assert mapping.exported(LAYER + local) == mapping.exported(LAYER + transformer_engine)


OF_DEEPSEEK = [  # (local, Transformer Engine)
    (
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    (
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("mlp.experts.local_experts.7.linear_fc2.weight", "mlp.experts.linear_fc2.weight7"),
]


@pytest.mark.parametrize(("local", "transformer_engine"), OF_DEEPSEEK)
@pytest.mark.parametrize("prefix", [LAYER, "mtp.layers.0.mtp_model_layer."])
def test_latent_attention_and_layers_behind_the_last_have_both_spellings(
    saved: Saved, prefix: str, local: str, transformer_engine: str
) -> None:
    mapping = mapping_for(read_spec(saved("deepseek_v3")))
    (name,) = mapping.hf_names(prefix + local)
    assert mapping.hf_names(prefix + transformer_engine) == (name,)
    assert name.startswith(f"model.layers.{1 if prefix == LAYER else 4}.")


def test_layers_behind_the_last_share_embedding_and_head(saved: Saved) -> None:
    mapping = mapping_for(read_spec(saved("glm4_moe without qk norm")))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert mapping.copies() == {
        "model.layers.4.embed_tokens.weight": embedding,
        "model.layers.5.embed_tokens.weight": embedding,
        "model.layers.4.shared_head.head.weight": head,
        "model.layers.5.shared_head.head.weight": head,
    }
    assert mapping.hf_names("embedding.word_embeddings.weight") == (embedding,)
    pairs = mapping.to_hf("output_layer.weight", [torch.rand(30, 32)])
    assert [name for name, _ in pairs] == [head, *list(mapping.copies())[2:]]
    assert all(torch.equal(tensor, pairs[0][1]) for _, tensor in pairs)


def test_biases_of_linear_qkv_lie_as_its_rows() -> None:
    """Query heads are 0.., key heads 100.., value heads 200..."""
    spec = dataclasses.replace(spec_of(4, 2), family="glm4_moe", qkv_bias=True)
    parts = [
        head_rows(first, count, spec.head_dim, 1)[:, 0]
        for first, count in ((0, 4), (100, 2), (200, 2))
    ]
    name = LAYER + "self_attention.linear_qkv.bias"
    order = [0, 1, 100, 200, 2, 3, 101, 201]
    mapping = mapping_for(spec)
    for size in (1, 2):
        shards = shards_of(mapping, name, parts, size)
        assert torch.cat(shards).tolist() == [h for h in order for _ in range(spec.head_dim)]
        for (_, tensor), part in zip(mapping.to_hf(name, shards), parts, strict=True):
            assert torch.equal(tensor, part)


def test_norms_and_router_are_whole_on_every_rank() -> None:
    mapping = mapping_for(spec_of())
    whole = [
        n for n in mapping.megatron_names() if n.startswith(LAYER) and not mapping.is_sharded(n)
    ]
    assert [n.removeprefix(LAYER) for n in whole] == [
        "input_layernorm.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
    ]
    router = torch.randn(8, 16)
    assert torch.equal(mapping.to_megatron(LAYER + "mlp.router.weight", [router], 1, 2), router)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.linear_qkv._extra_state",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "module.decoder.final_layernorm.weight",
        "decoder.layers.x.mlp.router.weight",
    ],
)
def test_parameters_without_a_rule_are_refused_by_name(name: str) -> None:
    with pytest.raises(DataError, match="qwen3_moe") as error:
        mapping_for(spec_of()).hf_names(name)
    assert name in str(error.value)


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes() -> None:
    name = LAYER + "self_attention.linear_qkv.weight"
    parts = [torch.zeros(32, 16), torch.zeros(8, 16), torch.zeros(4, 16)]
    with pytest.raises(DataError, match=r"v_proj.weight: found shape \[4, 16\].*\[8, 16\]"):
        mapping_for(spec_of()).to_megatron(name, parts)


def test_only_layers_with_experts_have_them(saved: Saved) -> None:
    names = mapping_for(read_spec(saved("moe_every_second_layer"))).megatron_names()
    with_router = [n for n in names if n.endswith("router.weight")]
    with_mlp = [n for n in names if n.endswith("mlp.linear_fc1.weight")]
    assert with_router == ["decoder.layers.1.mlp.router.weight"]
    assert with_mlp == [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 2)]
