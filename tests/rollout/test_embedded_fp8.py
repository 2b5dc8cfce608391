"""The embedded server in FP8: against transformers with every matrix product rounded by numpy."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import ConfigError
from megarl.models.fp8_export import fp8_weight
from megarl.ops import digest
from megarl.rollout import embedded_fp8
from megarl.rollout.embedded import Engine, Unusable
from megarl.rollout.embedded_model import DTYPES, SlotModel
from megarl.sync.receiver import ModelReceiver
from tests.conftest import make_tiny_model
from tests.helpers.families import save_model, wide
from tests.helpers.fp8_blocks import by_entry, grid, raw_header
from tests.helpers.tools import tool
from tests.ops.test_fp8_emulation import plain_blockwise
from tests.rollout.test_engine import NoWeights, ask

TOKENS = [3, 9, 14, 2, 7, 7, 20, 11, 5]
TOLERANCE = 1e-4  # fp32 sums in another order; FP8's own effect is 100 times that


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than one block of 128 either way, none of which ends with its matrix."""
    sizes = ("--layers", "2", "--hidden", "160", "--heads", "2", "--kv-heads", "1")
    sizes += ("--head-dim", "72", "--ffn", "200", "--init-std", "0.1")
    experts = ("--experts", "4", "--moe-ffn", "136", "--dense-layers", "0")
    return make_tiny_model(tmp_path_factory.mktemp("big") / "model", *sizes, *experts)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLA, shared experts, sigmoid routers."""
    return save_model("deepseek_v3", tmp_path_factory.mktemp("latent") / "model")


def product(x: Tensor, weight: Tensor, scales: str) -> Tensor:
    of = {"format": "e4m3", "power_of_two": scales == "power_of_two"}
    rows = plain_blockwise(x.reshape(-1, x.shape[-1]).numpy(), (1, 128), **of)
    blocks = plain_blockwise(weight.numpy(), (128, 128), **of)
    y = (rows.astype(np.float64) @ blocks.astype(np.float64).T).astype(np.float32)
    return torch.from_numpy(y).view(*x.shape[:-1], -1)


def linear(module: Any, scales: str, x: Tensor) -> Tensor:
    y = product(x, module.weight, scales)
    return y if module.bias is None else y + module.bias


def experts(module: Any, scales: str, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token, one expert at a time."""
    out = torch.zeros_like(hidden)
    for t, row in enumerate(hidden):
        for e, share in zip(index[t].tolist(), weights[t], strict=True):
            gate, up = (product(row[None], w, scales) for w in module.gate_up_proj[e].chunk(2))
            inner = module.act_fn(gate) * up
            out[t] += share * product(inner, module.down_proj[e], scales)[0]
    return out


@torch.no_grad()
def reference(folder: Path, scales: str | None) -> Tensor:
    """Log-probs [L - 1] of TOKENS[1:]; with ``scales`` every product of the layers but the
    routers' is rounded.
    """
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().requires_grad_(False)
    for name, module in model.named_modules() if scales else ():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = partial(linear, module, scales)
        elif name.endswith(".experts"):
            module.forward = partial(experts, module, scales)
    logits = model(torch.tensor([TOKENS])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def slot_model(folder: Path, **changes: Any) -> SlotModel:
    options: dict[str, Any] = {"num_slots": 4, "context_length": 64, "dtype": "fp32"}
    return SlotModel(folder, **{**options, "fixed_shape": True, "fp8": "f32", **changes})


def served(model: SlotModel) -> Tensor:
    tokens = np.array(TOKENS)
    if model.fixed_shape:
        rows = [
            model.forward_rows(tokens[t : t + 1], np.array([t]), np.array([0]))[0]
            for t in range(len(tokens))
        ]
        logits = torch.cat(rows)
    else:
        logits, _ = model.forward_chunk(tokens, 0, 0, all_logits=True)
    model.cache.clear()
    chosen = torch.tensor(TOKENS[1:])[:, None]
    return logits[:-1].double().log_softmax(-1).gather(1, chosen)[:, 0]


@pytest.mark.parametrize("fixed_shape", [True, False], ids=["fixed", "flexible"])
@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
@pytest.mark.parametrize("model", ["big", "latent"])
def test_layers_multiply_rounded_numbers(
    request: pytest.FixtureRequest, model: str, scales: str, fixed_shape: bool
) -> None:
    folder = request.getfixturevalue(model)
    found = served(slot_model(folder, fp8=scales, fixed_shape=fixed_shape))
    expected, plain = reference(folder, scales), reference(folder, None)
    assert (found - expected).abs().max() < TOLERANCE
    assert (expected - plain).abs().max() > 100 * TOLERANCE


def test_scales_are_seen(big: Path) -> None:
    f32, power_of_two = (served(slot_model(big, fp8=x)) for x in ("f32", "power_of_two"))
    assert (f32 - power_of_two).abs().max() > 100 * TOLERANCE


def test_without_fp8_nothing_is_rounded(big: Path) -> None:
    gap = served(slot_model(big, fp8="none")) - reference(big, None)
    assert gap.abs().max() < TOLERANCE


class Direct(NoWeights):
    """A receiver that has been given everything when an update ends."""

    def __init__(self, receiver: ModelReceiver, tensors: dict[str, Tensor]) -> None:
        self._receiver, self._tensors = receiver, tensors

    def begin(self) -> None:
        self._receiver.begin()

    def end(self) -> None:
        for name, tensor in self._tensors.items():
            self._receiver.weights.write(name, tensor)
        self._receiver.end()

    def digests(self) -> dict[str, str]:
        return self._receiver.digests()

    @property
    def digest_seconds(self) -> float:
        return self._receiver.digest_seconds


@pytest.fixture
def moved(big: Path, tmp_path: Path) -> Path:
    """The same model with other weights."""
    for file in big.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {n: t * 1.5 + 0.01 for n, t in load_file(big / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def engine_with(model: SlotModel, tensors: dict[str, Tensor]) -> Engine:
    engine = Engine(model, Direct(ModelReceiver(model.weights), tensors))
    engine.start()
    return engine


@pytest.mark.parametrize(
    ("name", "scales", "dtype"),
    [
        ("qwen3_moe tied", "f32", "bf16"),
        ("qwen3_moe tied", "power_of_two", "fp32"),
        ("deepseek_v3", "power_of_two", "bf16"),
        ("llama biases tied", "f32", "fp32"),
    ],
)
def test_codes_and_scales_are_those_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, scales: str, dtype: str
) -> None:
    """Bit for bit, and so are the values that layers multiply with."""
    source = save_model(name, tmp_path / "source", DTYPES[dtype], **wide(name))
    tool("quantize_hf_fp8").quantize(source, tmp_path / "out", scales)
    behind = "model.layers.4."  # for multi-token prediction: not served
    written = {
        name: raw
        for name, (code, _, raw) in raw_header(tmp_path / "out" / "model.safetensors").items()
        if (code == "F8_E4M3" or name.endswith("_scale_inv")) and not name.startswith(behind)
    }
    made: list[tuple[bytes, bytes]] = []

    def seen(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
        codes, its_scales = fp8_weight(weight, scales)
        made.append((codes.view(torch.uint8).numpy().tobytes(), its_scales.numpy().tobytes()))
        return codes, its_scales

    monkeypatch.setattr(embedded_fp8, "fp8_weight", seen)
    model = slot_model(source, fp8=scales, dtype=dtype)
    weights = [name for name in written if not name.endswith("_scale_inv")]
    assert sorted(made) == sorted((written[n], written[f"{n}_scale_inv"]) for n in weights)
    for name, module in model.module.named_modules():
        if f"{name}.weight" in weights:
            found = module.rounded_weight
            codes = np.frombuffer(written[f"{name}.weight"], np.uint8).reshape(found.shape)
            its_scales = np.frombuffer(written[f"{name}.weight_scale_inv"], np.float32).copy()
            its_scales = its_scales.reshape(grid(found.shape, (128, 128)))
            expected = by_entry(codes, torch.from_numpy(its_scales), (128, 128))
            assert np.array_equal(found.numpy(), expected), name


def test_new_weights_are_rounded_and_digested_as_they_came(big: Path, moved: Path) -> None:
    tensors = load_file(moved / "model.safetensors")
    model = slot_model(big)
    engine = engine_with(model, tensors)
    try:
        engine.begin_update().result(10)
        engine.end_update("1").result(60)
        assert engine.digests().result(60)[0] == {n: digest(t) for n, t in tensors.items()}
        assert (served(model) - reference(moved, "f32")).abs().max() < TOLERANCE
        engine.load_folder(big, "2", abort=False).result(60)
        assert (served(model) - reference(big, "f32")).abs().max() < TOLERANCE
    finally:
        engine.stop()


def test_weights_that_have_no_fp8_make_the_server_unusable(big: Path) -> None:
    tensors = load_file(big / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    engine = engine_with(slot_model(big), tensors)
    try:
        engine.begin_update().result(10)
        with pytest.raises(RuntimeError, match=r"nan at \[3, 5\]"):
            engine.end_update("1").result(60)
        with pytest.raises(Unusable, match="the weights cannot be used"):
            ask(engine, [[5, 6]])
        engine.load_folder(big, "2", abort=False).result(60)
        assert ask(engine, [[5, 6]])[0].versions == [("2", 0)]
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def fixed(big: Path) -> Iterator[Engine]:
    engine = Engine(slot_model(big, dtype="bf16"), NoWeights())
    engine.start()  # which checks that rows agree, wherever they are
    yield engine
    engine.stop()


def test_bits_do_not_depend_on_neighbours(fixed: Engine) -> None:
    prompts = [[5, 9], [3, 9, 14, 2], [8] * 7]
    alone = [ask(fixed, [p], sampling_seed=3)[0] for p in prompts]
    together = ask(fixed, prompts[::-1], sampling_seed=3)[::-1]
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == b.logprobs


def test_rows_that_are_not_finite_stay_alone(big: Path) -> None:
    """A token whose activations are NaN has NaN; its neighbours have what they had."""
    model = slot_model(big, num_slots=2)
    embedding = model.module.get_input_embeddings().weight
    tokens, at = np.array([4, 6]), np.array([0, 0])
    before, _ = model.forward_rows(tokens, at, np.array([0, 1]))
    model.cache.clear()
    with torch.no_grad():
        embedding[6] = float("nan")
    after, _ = model.forward_rows(tokens, at, np.array([0, 1]))
    assert torch.equal(after[0], before[0]) and after[1].isnan().all()


def test_other_scales_are_refused(big: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp8: found e4m3.*none or f32 or power_of_two"):
        slot_model(big, fp8="e4m3")
