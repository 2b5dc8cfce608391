"""Parameter counts: those that publishers state, those of the mapping tables, and their split."""

import math
from dataclasses import replace

import pytest

from megarl.errors import DataError
from megarl.mesh import Mesh
from megarl.models.mapping import VOCAB_MULTIPLE, mapping_for, padded_vocab_size
from megarl.models.spec import FAMILIES, ModelSpec
from megarl.plan.parameters import (
    active_parameters,
    layer_count,
    mtp_parameters,
    stage_count,
    total_parameters,
)
from tests.plan.published import GLM_4_5, GPT_OSS_120B, MOONLIGHT, PUBLISHED, QWEN3_8B, QWEN3_30B


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    model = PUBLISHED[name]
    total = total_parameters(model.spec)
    assert model.exact in (None, total)
    if model.total is not None:
        assert _printed(total, model.total) == model.total
    if model.active is not None:  # 3.35 and 37.55 are cut, not rounded
        off = active_parameters(model.spec) / 1e9 - float(model.active)
        assert abs(off) < 10.0 ** -len(model.active.partition(".")[2])


def _printed(count: int, like: str) -> str:
    """Billions with as many digits behind the point."""
    digits = len(like.partition(".")[2])
    return f"{count / 1e9:.{digits}f}"


def test_deepseek_v3_activates_what_its_readme_says() -> None:
    spec = PUBLISHED["deepseek-v3"].spec
    without_embedding = active_parameters(spec) - spec.vocab * spec.hidden
    assert _printed(without_embedding, "36.6") == "36.6"
    projection = 2 * spec.hidden**2  # which its 11.5 B of the prediction layer leave out
    assert _printed(mtp_parameters(spec) - projection, "11.5") == "11.5"


def test_glm_4_5_is_counted_as_its_report_does() -> None:
    tables = 2 * GLM_4_5.vocab * GLM_4_5.hidden
    total = total_parameters(GLM_4_5) + mtp_parameters(GLM_4_5) - tables
    assert _printed(total, "355") == "355"
    assert _printed(active_parameters(GLM_4_5) - tables, "32") == "32"


def test_gpt_oss_activates_what_its_card_says() -> None:
    spec = GPT_OSS_120B
    assert _printed(active_parameters(spec) - spec.vocab * spec.hidden, "5.13") == "5.13"


def test_moonlight_is_counted_as_its_report_does() -> None:
    tables = 2 * MOONLIGHT.vocab * MOONLIGHT.hidden
    assert _printed(total_parameters(MOONLIGHT) - tables, "15.29") == "15.29"
    assert _printed(active_parameters(MOONLIGHT) - tables, "2.24") == "2.24"


def tiny(spec: ModelSpec, **dims: object) -> ModelSpec:
    """The family of ``spec`` in small; no two sizes are equal."""
    moe = spec.experts > 0
    small = {
        "hidden": 64,
        "layers": 4,
        "heads": 4,
        "kv_heads": 4 if spec.mla else 2,
        "ffn": 96,
        "moe_ffn": 40 if moe else 0,
        "experts": 8 if moe else 0,
        "topk": min(2, spec.topk),
        "vocab": 100,
        "moe_layers": (moe and spec.mlp_bias, *(moe,) * 3),
        "windows": (4, 0, 4, 0) if spec.windows else (),
    }
    return replace(spec, **{**small, **dims})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_those_of_the_mapping_tables(name: str, tied: bool) -> None:
    spec = tiny(PUBLISHED[name].spec, tie_embeddings=tied)
    if spec.family not in FAMILIES:
        pytest.skip(f"no mapping of {spec.family} yet")
    tensors = mapping_for(spec).hf_spec()
    # tables that an MTP layer has once more
    copies = spec.mtp_layers * (1 if tied else 2) * spec.vocab * spec.hidden
    expected = total_parameters(spec) + mtp_parameters(spec) + copies
    assert sum(math.prod(t.shape) for t in tensors) == expected


MESHES = [
    Mesh(),
    Mesh(tp=2, etp=2),
    Mesh(tp=4, ep=2, etp=1),
    Mesh(pp=2),
    Mesh(pp=2, vpp=2),
    Mesh(pp=4, dp=2, ep=2),
    Mesh(pp=3, first_layers=1, last_layers=1),
    Mesh(tp=2, pp=2, ep=4, dp=2, etp=1),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "glm-4.5"])
def test_stages_together_hold_the_model_once(name: str, mesh: Mesh, tied: bool) -> None:
    """What tp splits times tp, what ep and etp split times these, and the rest once."""
    spec = tiny(PUBLISHED[name].spec, tie_embeddings=tied)
    stages = [stage_count(spec, mesh, r) for r in range(mesh.pp)]
    whole = [stage_count(spec, replace(mesh, tp=1, ep=1, etp=1), r) for r in range(mesh.pp)]
    assert sum(s.expert for s in stages) * mesh.ep * mesh.etp == sum(s.expert for s in whole)
    for stage, full in zip(stages, whole, strict=True):
        assert full.shared / mesh.tp <= stage.shared <= full.shared
        assert stage.buffers == full.buffers
    padding = (padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) - spec.vocab) * spec.hidden
    table = spec.vocab * spec.hidden
    tables = 1 if tied and mesh.pp == 1 else 2
    copied = table if tied and mesh.pp > 1 else 0
    everything = sum(s.parameters + s.buffers for s in whole) - tables * padding - copied
    assert everything == total_parameters(spec) + mtp_parameters(spec)


def test_what_tensor_parallelism_leaves_whole_is_the_norms_and_the_router() -> None:
    spec = QWEN3_30B
    one, eight = (layer_count(spec, Mesh(tp=tp), moe=True).shared for tp in (1, 4))
    whole = (4 * eight - one) / 3
    assert whole == 2 * spec.hidden + 2 * spec.head_dim + spec.experts * spec.hidden


def test_linear_attention_is_refused() -> None:
    spec = replace(QWEN3_8B, linear_layers=(True,) * 36)
    with pytest.raises(DataError, match="linear attention"):
        total_parameters(spec)
