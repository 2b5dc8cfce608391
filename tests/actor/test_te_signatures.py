"""What the layers of ``train.transformer_impl: transformer_engine`` rely on in Megatron's sources,
read without importing them: an upgrade that renames one of it fails here, on any machine. That the
real modules then behave as their sources say is what tests/te shows (``make check-te``).
"""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "extensions/transformer_engine.py"
PROVIDER = "extensions/transformer_engine_spec_provider.py"


@functools.cache
def upstream(file: str) -> ast.Module:
    """A file of megatron-core."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def class_of(file: str, name: str) -> ast.ClassDef:
    (found,) = (
        node
        for node in ast.walk(upstream(file))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return found


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def arguments(function: ast.FunctionDef) -> set[str]:
    a = function.args
    return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)} - {"self", "cls"}


def fields(file: str, name: str) -> dict[str, str]:
    """Of a dataclass: name -> annotation."""
    body = class_of(file, name).body
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def texts(node: ast.AST) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def literals(node: ast.AST) -> list[object]:
    """Dictionaries that are written down."""
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            try:
                found.append(ast.literal_eval(part))
            except ValueError:
                continue
    return found


def test_the_provider_has_every_module_that_layers_ask_it_for() -> None:
    ours = ast.parse((ROOT / "megarl" / "actor" / "modules.py").read_text())
    calls = [
        node
        for node in ast.walk(ours)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "te")
            or (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "TESpecProvider()")
        )
    ]
    asked = {node.attr for node in calls}
    assert len(asked) == 7, asked
    theirs = methods(class_of(PROVIDER, "TESpecProvider"))
    assert asked <= theirs.keys()
    assert "rms_norm" in arguments(theirs["layer_norm"])
    assert arguments(theirs["grouped_mlp_modules"]) == {"moe_use_grouped_gemm"}


GIVES = {
    "linear": "TELinear",
    "column_parallel_linear": "TEColumnParallelLinear",
    "row_parallel_linear": "TERowParallelLinear",
    "column_parallel_layer_norm_linear": "TELayerNormColumnParallelLinear",
    "core_attention": "TEDotProductAttention",
}


@pytest.mark.parametrize("method, name", GIVES.items())
def test_it_gives_the_module_whose_parameters_are_mapped(method: str, name: str) -> None:
    function = methods(class_of(PROVIDER, "TESpecProvider"))[method]
    returned = [
        ast.unparse(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value
    ]
    assert returned == [name]


BASES = {  # whose parameters are weight, bias; layer_norm_weight; weight0, bias0; softmax_offset
    "TELinear": "te.pytorch.Linear",
    "TEColumnParallelLinear": "TELinear",
    "TERowParallelLinear": "TELinear",
    "TELayerNormColumnParallelLinear": "te.pytorch.LayerNormLinear",
    "TEGroupedLinear": "te.pytorch.GroupedLinear",
    "TEColumnParallelGroupedLinear": "TEGroupedLinear",
    "TERowParallelGroupedLinear": "TEGroupedLinear",
    "TEDotProductAttention": "te.pytorch.DotProductAttention",
}


@pytest.mark.parametrize("name, base", BASES.items())
def test_its_modules_are_transformer_engines(name: str, base: str) -> None:
    assert [ast.unparse(b) for b in class_of(EXTENSION, name).bases] == [base]


SPLIT = {
    "TEColumnParallelLinear": {"weight": 0, "bias": 0},
    "TERowParallelLinear": {"weight": 1},
    "TELayerNormColumnParallelLinear": {"weight": 0, "bias": 0},
    "TEDotProductAttention": {"softmax_offset": 0},
}


@pytest.mark.parametrize("name, axes", SPLIT.items())
def test_checkpoints_split_them_as_local_ones(name: str, axes: dict[str, int]) -> None:
    function = methods(class_of(EXTENSION, name))["sharded_state_dict"]
    assert axes in literals(function)


def test_down_projections_of_latent_attention_are_whole() -> None:
    linear = methods(class_of(EXTENSION, "TELinear"))
    assert "parallel_mode" in arguments(linear["__init__"])
    attention = class_of("transformer/multi_latent_attention.py", "MLASelfAttention")
    source = ast.unparse(methods(attention)["__init__"])
    for latent in ("q", "kv"):
        assert f"if submodules.linear_{latent}_down_proj in [TELinear]:\n" in source.replace(
            "elif", "if"
        )
        assert f"{latent}_down_proj_kwargs['parallel_mode'] = 'duplicated'" in source


def test_latent_attention_asks_for_what_the_layer_spec_resolves() -> None:
    ours = ast.parse((ROOT / "megarl" / "actor" / "latent_attention.py").read_text())
    (given,) = (
        ast.literal_eval(node.value)
        for node in ours.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_OF_THE_SPEC"
    )
    resolver = class_of("transformer/mla_qk_norm_config.py", "QKNormConfigResolver")
    assert set(given) == arguments(methods(resolver)["_result"])
    file = "transformer/multi_latent_attention.py"
    assert set(given) <= fields(file, "MLASelfAttentionSubmodules").keys()


def test_names_of_grouped_experts_and_fused_norms_are_those_that_are_mapped() -> None:
    grouped = methods(class_of(EXTENSION, "TEGroupedLinear"))["_sharded_state_dict_grouped"]
    templates = {ast.unparse(n) for n in ast.walk(grouped) if isinstance(n, ast.JoinedStr)}
    assert {"f'{prefix}weight{gemm_idx}'", "f'{prefix}bias{gemm_idx}'"} <= templates
    assert any("_extra_state" in template for template in templates)
    assert "mlp.linear_fc1.layer_norm_weight" in texts(upstream("models/gpt/gpt_layer_specs.py"))


FP8 = {
    ("transformer/transformer_config.py", "TransformerConfig"): {
        *("fp8", "fp8_recipe", "fp8_param", "fp8_margin", "fp8_amax_history_len"),
        *("fp8_amax_compute_algo", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
        *("num_layers_at_end_in_bf16", "transformer_impl", "use_cpu_initialization"),
    },
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"): {
        "fp8_param_gather"
    },
    ("optimizer/optimizer_config.py", "OptimizerConfig"): {"fp8_recipe"},
}


@pytest.mark.parametrize(
    "where, names", FP8.items(), ids=lambda x: x[1] if type(x) is tuple else ""
)
def test_settings_of_fp8_have_the_names_that_we_use(
    where: tuple[str, str], names: set[str]
) -> None:
    inherited = fields("model_parallel_config.py", "ModelParallelConfig")
    found = {**inherited, **fields(*where)} if "Transformer" in where[1] else fields(*where)
    assert names <= found.keys()
    if "transformer_impl" in found:
        assert "'local', 'transformer_engine'" in found["transformer_impl"]


def test_its_adam_is_the_first_choice_and_counts_steps_in_groups() -> None:
    """``actor/adam.py`` tells optimizers by that name, and takes the count from there."""
    body = upstream("optimizer/__init__.py").body
    first = next(
        node for node in body if isinstance(node, ast.Try) and "FusedAdam" in ast.unparse(node)
    )
    assert ast.unparse(first.body[0]) == (
        "from transformer_engine.pytorch.optimizers import FusedAdam as Adam"
    )
    distributed = class_of("optimizer/distrib_optimizer.py", "DistributedOptimizer")
    source = ast.unparse(methods(distributed)["state_dict"])
    assert "param_group['step'] = int(step)" in source and "param_group['step'] = step" in source
