"""The embedded server with weights in FP8: what it holds, digests and computes with, from a folder
and after a push.

Expected values are transformers' with weights that the definition of e4m3 gives. Codes and scales
are random, so that a server which rounded the values anew would have other codes.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import ConfigError, DataError, SyncError
from megarl.models.live_folder import load_weights, open_weights
from megarl.ops import digest
from megarl.ops.fp8_block import fp8_block_dequant_ref
from megarl.rollout.embedded import Engine, Unusable
from megarl.rollout.embedded_model import SlotModel
from megarl.sync.receiver import ModelReceiver
from megarl.sync.stream import flatten, specs_of
from tests.helpers.families import save_model, wide
from tests.helpers.fp8_blocks import (
    BLOCKS,
    as_codes,
    by_entry,
    edit_config,
    finite_codes,
    grid,
    quantised,
)
from tests.ops.test_fp8_emulation import plain_blockwise
from tests.rollout.test_embedded_fp8 import TOKENS, TOLERANCE, served, slot_model
from tests.rollout.test_engine import ask
from tests.sync.bucketing import bucketize

BEHIND = "model.layers.4."  # of deepseek_v3: for multi-token prediction
PLAIN = "model.layers.1.self_attn.o_proj"  # and what is plain in every model here
Made = tuple[Path, dict[str, Tensor], dict[str, Tensor]]  # folder, what it holds, values


def in_fp8(source: Path, out: Path, seed: int, **config: Any) -> Made:
    """Random codes for the projections, with scales that leave activations of order 1."""
    tensors = load_file(source / "model.safetensors")
    held, values = dict(tensors), dict(tensors)
    random = np.random.default_rng(seed)
    for name in sorted(tensors):
        if name.endswith("_proj.weight") and PLAIN not in name and "eh_proj" not in name:
            shape = tuple(tensors[name].shape)
            codes = finite_codes(shape, int(random.integers(2**31)))
            codes[codes & 127 > 0x58] -= 0x28  # up to 16, of 448
            scale = torch.from_numpy(
                random.uniform(0.01, 0.03, grid(shape, (128, 128))).astype(np.float32)
            )
            held |= {name: as_codes(codes), f"{name}_scale_inv": scale}
            values[name] = torch.from_numpy(by_entry(codes, scale, (128, 128)))
        elif ".mlp.gate" not in name:
            held[name] = values[name] = tensors[name] + 0.01 * seed
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    edit_config(out, quantization_config={**BLOCKS, "modules_to_not_convert": [PLAIN], **config})
    return out, held, values


MODELS = [pytest.param("qwen3_moe yarn", marks=pytest.mark.slow), "deepseek_v3"]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Made]:
    """Two folders of one model with other weights."""
    folder = tmp_path_factory.mktemp("fp8")
    source = save_model(request.param, folder / "source", **wide(request.param))
    return in_fp8(source, folder / "a", 1), in_fp8(source, folder / "b", 2)


@torch.no_grad()
def reference(made: Made, scales: str) -> Tensor:
    """Log-probs [L - 1] of TOKENS[1:]; with ``scales``, of what is in codes the inputs are rounded,
    and weights are the values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, held, values = made
    plain = folder.parent / f"{folder.name}_values"
    if not plain.exists():
        plain.mkdir()
        for file in folder.iterdir():
            (plain / file.name).write_bytes(file.read_bytes())
        save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
        edit_config(plain, quantization_config=None)
    config = AutoConfig.from_pretrained(plain)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "config": config}
    model = AutoModelForCausalLM.from_pretrained(plain, **options).eval()
    for name, module in model.named_modules() if scales != "none" else ():
        if f"{name}.weight_scale_inv" in held:
            module.forward = partial(linear, module, scales)
        elif name.endswith(".experts"):
            module.forward = partial(experts, module, scales)
    logits = model(torch.tensor([TOKENS])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def rows(x: Tensor, scales: str) -> Tensor:
    power = scales == "power_of_two"
    flat = x.reshape(-1, x.shape[-1]).numpy()
    rounded = plain_blockwise(flat, (1, 128), format="e4m3", power_of_two=power)
    return torch.from_numpy(rounded).double().view(x.shape)


def linear(module: Any, scales: str, x: Tensor) -> Tensor:
    y = (rows(x, scales) @ module.weight.double().T).float()
    return y if module.bias is None else y + module.bias


def experts(module: Any, scales: str, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token, one expert at a time."""
    out = torch.zeros_like(hidden)
    for t, row in enumerate(hidden):
        for e, share in zip(index[t].tolist(), weights[t], strict=True):
            gate_up = (rows(row[None], scales) @ module.gate_up_proj[e].double().T).float()
            gate, up = gate_up.chunk(2, -1)
            inner = rows(module.act_fn(gate) * up, scales)
            out[t] += share * (inner @ module.down_proj[e].double().T).float()[0]
    return out


def server(folder: Path, fp8: str = "none", dtype: str = "fp32", fixed: bool = True) -> SlotModel:
    return slot_model(folder, fp8=fp8, dtype=dtype, fixed_shape=fixed)


def known(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if not n.startswith(BEHIND)}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def send(receiver: ModelReceiver, tensors: dict[str, Tensor], max_bytes: int = 10**9) -> None:
    for bucket in bucketize(tensors.items(), max_bytes):
        receiver.take(specs_of(bucket), flatten(bucket))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "flexible"])
@pytest.mark.parametrize("fp8", ["none", "f32", "power_of_two"])
def test_a_folders_values_are_computed_with(pair: tuple[Made, Made], fp8: str, fixed: bool) -> None:
    made = pair[0]
    found = served(server(made[0], fp8, fixed=fixed))
    assert (found - reference(made, fp8)).abs().max() < TOLERANCE
    other = reference(pair[1], fp8)
    assert (found - other).abs().max() > 100 * TOLERANCE
    if fp8 == "none":
        assert (found - reference(made, "f32")).abs().max() > 10 * TOLERANCE


def test_what_a_folder_holds_is_held_and_digested(pair: tuple[Made, Made]) -> None:
    for made in pair:
        receiver = ModelReceiver(server(made[0]).weights)
        found, expected = receiver.digests(), digests(made[1])
        assert {n: d for n, d in found.items() if not n.startswith(BEHIND)} == digests(
            known(made[1])
        )
        assert all(found[n] == expected[n] for n in found)
        codes = {n for n, t in known(made[1]).items() if t.dtype == torch.float8_e4m3fn}
        assert receiver.weights.codes == codes and len(codes) > 10


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fp8", ["none", "f32", "power_of_two"])
def test_a_push_makes_the_server_one_that_was_started_with_the_weights(
    pair: tuple[Made, Made], fp8: str, dtype: str
) -> None:
    """Every bit of its log-probs, and of what it holds."""
    (a, _, _), (b, pushed, _) = pair
    if dtype == "bf16":
        pushed = {n: as_served(n, t) for n, t in pushed.items()}
    model, fresh = server(a, fp8, dtype), server(b, fp8, dtype)
    before, expected = served(model), served(fresh)
    receiver = ModelReceiver(model.weights)
    receiver.begin()
    send(receiver, pushed, 2 * 10**5)
    receiver.end()
    model.weights_changed()
    assert torch.equal(served(model), expected) and not torch.equal(before, expected)
    assert receiver.digests() == digests(pushed)
    held = model.weights.held
    assert held.keys() == known(pushed).keys()
    for name, tensor in fresh.weights.held.items():
        assert torch.equal(as_raw(held[name]), as_raw(tensor)), name
        assert torch.equal(as_raw(held[name]), as_raw(pushed[name])), name


def as_served(name: str, tensor: Tensor) -> Tensor:
    """As a server in bf16 has it."""
    kept = name.endswith(("_scale_inv", "e_score_correction_bias"))
    plain = tensor.dtype == torch.float32 and not kept
    return tensor.bfloat16() if plain else tensor


def as_raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("fp8", ["none", "f32"])
def test_another_folder_is_loaded_as_it_would_be_at_the_start(
    pair: tuple[Made, Made], fp8: str
) -> None:
    (a, _, _), (b, held, _) = pair
    model, fresh = server(a, fp8), server(b, fp8)
    model.load_folder(model.open_folder(b))
    model.weights_changed()
    assert torch.equal(served(model), served(fresh)) and model.folder == b
    assert model.weights.digests() == digests(held)  # layers behind the last, too


def test_codes_and_scales_may_come_apart_and_in_any_order(pair: tuple[Made, Made]) -> None:
    (a, _, _), (b, pushed, _) = pair
    expected = served(server(b))
    for backwards in (False, True):
        model = server(a)
        receiver = ModelReceiver(model.weights)
        receiver.begin()
        by_scale = sorted(pushed, key=lambda n: n.endswith("_scale_inv"), reverse=backwards)
        for name in by_scale:
            send(receiver, {name: pushed[name]})
        receiver.end()
        assert torch.equal(served(model), expected)


def test_values_are_the_codes_times_the_scales_in_the_servers_dtype(
    pair: tuple[Made, Made],
) -> None:
    folder, held, _ = pair[0]
    for dtype in (torch.float32, torch.bfloat16):
        model = server(folder, dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
        parameters = dict(model.module.named_parameters())
        name = "model.layers.2.mlp.experts.3.down_proj.weight"
        expected = fp8_block_dequant_ref(held[name], held[f"{name}_scale_inv"], 128, 128, dtype)
        assert torch.equal(parameters["model.layers.2.mlp.experts.down_proj"][3], expected)


def test_bfloat16_scales_are_held_as_float32(pair: tuple[Made, Made], tmp_path: Path) -> None:
    """As Qwen3's own folders have them, and what servers are sent is float32."""
    folder, held, _ = pair[0]
    rounded = {n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in held.items()}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = server(tmp_path)
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    assert model.weights.held[name].dtype == torch.float32
    assert torch.equal(model.weights.held[name], held[name].bfloat16().float())
    expected = {n: digest(t.float() if n.endswith("_scale_inv") else t) for n, t in rounded.items()}
    assert model.weights.digests() == expected


def test_a_push_in_another_form_is_refused_by_name(pair: tuple[Made, Made]) -> None:
    (a, held, values), name = pair[0], "model.layers.2.self_attn.o_proj.weight"
    receiver = ModelReceiver(server(a).weights)
    receiver.begin()
    shape = tuple(values[name].shape)
    with pytest.raises(SyncError, match=rf"{name}: found .*'float32'\).*'float8_e4m3fn'\)"):
        send(receiver, {name: values[name]})
    plain = f"{PLAIN}.weight"
    with pytest.raises(SyncError, match=f"{plain}_scale_inv is not a weight"):
        send(receiver, {f"{plain}_scale_inv": torch.ones(1, 1)})
    wrong = torch.ones(grid(shape, (64, 128)))
    with pytest.raises(SyncError, match=rf"{name}_scale_inv: found"):
        send(receiver, {f"{name}_scale_inv": wrong})
    send(receiver, {n: t for n, t in held.items() if n != f"{name}_scale_inv"})
    with pytest.raises(SyncError, match=rf"1 of \d+ were not received \({name}_scale_inv\)"):
        receiver.end()


def test_a_folder_in_another_form_is_refused_and_nothing_has_happened(
    pair: tuple[Made, Made], tmp_path: Path
) -> None:
    made = pair[0]
    reference(made, "none")  # which writes the folder of the values
    plain = made[0].parent / f"{made[0].name}_values"
    name = "model.layers.2.self_attn.o_proj.weight"
    for folder, other, said in (
        (made[0], plain, f"{name}: found plain; the server has it in FP8 blocks"),
        (plain, made[0], f"{name}: found in FP8 blocks; the server has it plain"),
    ):
        model = server(folder)
        before = served(model)
        with pytest.raises(DataError, match=said):
            model.open_folder(other)
        assert torch.equal(served(model), before)


def test_other_blocks_are_dequantised_but_not_multiplied_in(tmp_path: Path) -> None:
    source = save_model("qwen3_moe tied", tmp_path / "source", **wide("qwen3_moe tied"))
    folder, values = quantised(source, tmp_path / "odd", (16, 24))
    held = server(folder).weights
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert torch.equal(held.values(name, torch.float32), values[name])
    with pytest.raises(ConfigError, match=r"fp8: found f32 of a model in blocks of \[16, 24\]"):
        server(folder, "f32")
    whole = server(in_fp8(source, tmp_path / "whole", 1)[0])
    with pytest.raises(DataError, match=r"blocks of FP8: found \[16, 24\]; .* are \[128, 128\]"):
        whole.open_folder(folder)


@pytest.mark.parametrize(("stored", "other"), [("ue8m0", "f32"), ("float", "power_of_two")])
def test_activations_have_scales_of_the_weights_kind(
    tmp_path: Path, stored: str, other: str
) -> None:
    source = save_model("qwen3_moe tied", tmp_path / "source", **wide("qwen3_moe tied"))
    folder, _, _ = in_fp8(source, tmp_path / "a", 1, scale_fmt=stored)
    same = {"f32": "power_of_two", "power_of_two": "f32"}[other]
    with pytest.raises(ConfigError, match=f"fp8: found {other}; accepted: none or {same}, as"):
        server(folder, other)
    assert served(server(folder, same)).isfinite().all()


def test_a_layer_whose_experts_are_partly_plain_is_not_multiplied_in_fp8(tmp_path: Path) -> None:
    source = save_model("qwen3_moe tied", tmp_path / "source", **wide("qwen3_moe tied"))
    folder, held, values = in_fp8(source, tmp_path / "a", 1)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    save_file(
        {**{n: t for n, t in held.items() if name not in n}, name: values[name]},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert served(server(folder)).isfinite().all()
    with pytest.raises(ConfigError, match=rf"fp8: found .*{name} is plain"):
        server(folder, "f32")


@pytest.fixture
def engine(pair: tuple[Made, Made]) -> Iterator[Engine]:
    model = server(pair[0][0], "f32")
    engine = Engine(model, ModelReceiver(model.weights))
    engine.start()
    yield engine
    engine.stop()


def test_a_folder_that_is_cut_while_it_is_read_leaves_the_server_unusable(
    engine: Engine, pair: tuple[Made, Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    for file in pair[1][0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    opened = engine.model.open_folder

    def then_cut(path: Path) -> Any:
        source = opened(path)
        with (path / "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, 2) // 2)
        return source

    monkeypatch.setattr(engine.model, "open_folder", then_cut)
    with pytest.raises(DataError, match="cut short while open"):
        engine.load_folder(folder, "1", abort=False).result(60)
    with pytest.raises(Unusable, match=r"a load of weights failed: .*cut short"):
        ask(engine, [[5, 6]])
    monkeypatch.undo()
    engine.load_folder(pair[1][0], "2", abort=False).result(60)
    assert ask(engine, [[5, 6]])[0].versions == [("2", 0)]


def test_digests_take_time_that_is_told(engine: Engine, pair: tuple[Made, Made]) -> None:
    """It grows with every update, and not by asking."""
    _, first = engine.digests().result(60)
    assert engine.digests().result(60)[1] == first > 0
    weights = engine.model.weights
    load_weights(open_weights(pair[1][0], weights), weights)
    assert engine.digests().result(60)[1] > first
