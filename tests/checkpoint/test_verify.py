"""``--verify``: what is not the source is named, all of it; what is passes."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.checkpoint import verify
from megarl.checkpoint.digests import DIGESTS, Digests, digests_json
from megarl.checkpoint.streamed import write_weights
from megarl.checkpoint.verify import (
    available_memory,
    compare_logprobs,
    compare_with_import,
    judge_logprobs,
    stored_digests,
    verify_export,
    verify_import,
)
from megarl.errors import DataError
from megarl.model_logprobs import by_transformers
from megarl.models.fp8_export import fp8_export
from megarl.models.hf_io import open_checkpoint
from megarl.models.sharded import megatron_mapping, parameter_names
from megarl.models.spec import read_spec
from megarl.rundir import write_json
from tests.helpers.export import export
from tests.helpers.families import reference_logprobs, save_model, wide
from tests.helpers.fp8_blocks import quantised
from tests.helpers.samples import random_samples

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], list[str]]  # of a model; returns what it changed
EXPERT = "model.layers.2.mlp.experts.{}.{}_proj.weight"


def imported(hf: Path, checkpoint: Path) -> Digests:
    (checkpoint / "megatron").mkdir(parents=True)
    return write_weights(checkpoint / "megatron", open_checkpoint(hf), read_spec(hf))


def changed(hf: Path, change: Change) -> list[str]:
    tensors = load_file(hf / "model.safetensors")
    names = change(tensors)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        hf / "model.safetensors",
        metadata={"format": "pt"},
    )
    return names


def lines_of(error: pytest.ExceptionInfo[DataError]) -> list[str]:
    return [line.strip().partition(":")[0] for line in str(error.value).splitlines()[1:]]


# --- kinds of wrong conversions -------------------------------------------------------------------


def gate_for_up(tensors: Tensors) -> list[str]:
    names = [EXPERT.format(3, kind) for kind in ("gate", "up")]
    tensors |= {a: tensors[b].clone() for a, b in zip(names, names[::-1], strict=True)}
    return names


def one_expert_for_another(tensors: Tensors) -> list[str]:
    names = [EXPERT.format(e, "down") for e in (1, 6)]
    tensors |= {a: tensors[b].clone() for a, b in zip(names, names[::-1], strict=True)}
    return names


def an_expert_of_another_layer(tensors: Tensors) -> list[str]:
    name = EXPERT.format(5, "down")
    tensors[name] = tensors[name.replace("layers.2", "layers.3")].clone()
    return [name]


def heads_in_another_order(tensors: Tensors) -> list[str]:
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name].view(rows, -1, 2).flip(1).reshape(rows, columns)
    return [name]


def the_last_bit_of_one_value(tensors: Tensors) -> list[str]:
    name = "model.layers.1.input_layernorm.weight"
    tensors[name].view(torch.int16)[7] ^= 1
    return [name]


def the_sign_of_zero(tensors: Tensors) -> list[str]:
    name = "model.embed_tokens.weight"
    tensors[name][3, 4] = -0.0
    return [name]


def a_bias_rounded(tensors: Tensors) -> list[str]:
    names = [n for n in tensors if n.endswith("e_score_correction_bias")]
    for name in names:
        tensors[name] = tensors[name].bfloat16().float()
    return names


def everything(tensors: Tensors) -> list[str]:
    for tensor in tensors.values():
        tensor.mul_(1.5)
    return list(tensors)


WRONG = [gate_for_up, one_expert_for_another, an_expert_of_another_layer, heads_in_another_order]
WRONG += [the_last_bit_of_one_value, the_sign_of_zero, a_bias_rounded, everything]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts' biases in fp32, and a zero in the embedding."""
    hf = save_model(
        "deepseek_v3 direct queries", tmp_path_factory.mktemp("hf") / "m", torch.bfloat16
    )

    def zero(tensors: Tensors) -> list[str]:
        tensors["model.embed_tokens.weight"][3, 4] = 0.0
        return []

    changed(hf, zero)
    return hf


@pytest.fixture(scope="module")
def plain_checkpoint(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "c"
    write_json(checkpoint / DIGESTS, digests_json(imported(plain, checkpoint)))
    return checkpoint


def copy_of(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


@pytest.mark.parametrize("wrong", WRONG)
def test_an_import_of_other_weights_is_refused_with_every_tensor(
    plain: Path, plain_checkpoint: Path, tmp_path: Path, wrong: Change
) -> None:
    """Expected are the digests of the source; what lies in the checkpoint has a fault."""
    digests = stored_digests(plain_checkpoint)
    spoiled = copy_of(plain, tmp_path / "spoiled")
    names = changed(spoiled, wrong)
    imported(spoiled, tmp_path / "wrong")
    with pytest.raises(DataError) as error:
        verify_import(tmp_path / "wrong", read_spec(plain), digests)
    assert sorted(lines_of(error)) == sorted(names)
    assert f"{len(names)} of {len(digests)} tensors are not what was imported" in str(error.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_an_export_of_other_weights_is_refused_with_every_parameter(
    plain: Path, plain_checkpoint: Path, tmp_path: Path, wrong: Change
) -> None:
    spoiled = copy_of(plain, tmp_path / "spoiled")
    mapping = megatron_mapping(read_spec(plain))
    names = set(changed(spoiled, wrong))
    with pytest.raises(DataError) as error:
        verify_export(plain_checkpoint / "megatron", spoiled, read_spec(plain))
    assert sorted(lines_of(error)) == sorted(
        p for p in parameter_names(mapping) if names & set(mapping.hf_names(p))
    )


FAMILIES = ["qwen3 yarn tied", "qwen3_moe yarn", "deepseek_v3", "glm4_moe without qk norm"]
FAMILIES += ["gpt_oss", "gpt_oss without yarn", "qwen2", "llama biases tied", "kimi_k2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_conversions_of_every_family_pass(tmp_path: Path, name: str) -> None:
    """Fused experts, tied embeddings, copies for layers behind the last; and an export says that it
    is what was imported.
    """
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)
    spec, checkpoint = read_spec(hf), tmp_path / "checkpoint"
    digests = imported(hf, checkpoint)
    tensors = len(load_file(hf / "model.safetensors"))
    assert verify_import(checkpoint, spec, digests).startswith(f"verified: {tensors} tensors")
    assert "no digests of imported weights" in compare_with_import(checkpoint, digests)
    write_json(checkpoint / DIGESTS, digests_json(digests))
    seen = []

    def verify(part: Path) -> None:
        assert not (tmp_path / "back").exists()
        seen.append(verify_export(checkpoint / "megatron", part, spec))

    exported = export(checkpoint / "megatron", tmp_path / "back", spec, hf, verify)
    parameters = len(parameter_names(megatron_mapping(spec)))
    assert seen == [f"verified: {parameters} parameters, read back, are those of the checkpoint"]
    assert compare_with_import(checkpoint, exported) == (
        f"identical to the imported weights: {tensors} tensors by their digests"
    )


def test_an_export_that_is_refused_is_not_published(
    plain: Path, plain_checkpoint: Path, tmp_path: Path
) -> None:
    def refuse(part: Path) -> None:
        raise DataError(f"no: {part.name}")

    spec = read_spec(plain)
    with pytest.raises(DataError, match="no: "):
        export(plain_checkpoint / "megatron", tmp_path / "back", spec, plain, refuse)
    assert not list(tmp_path.iterdir())


def test_trained_weights_are_no_error_and_counted(
    plain: Path, plain_checkpoint: Path, tmp_path: Path
) -> None:
    trained = copy_of(plain, tmp_path / "trained")
    names = changed(trained, one_expert_for_another) + changed(trained, the_sign_of_zero)
    line = compare_with_import(plain_checkpoint, imported(trained, tmp_path / "checkpoint"))
    count = len(load_file(plain / "model.safetensors"))
    assert line == f"{len(names)} of {count} tensors differ from the imported weights"


def test_copies_that_are_not_what_they_repeat_are_named(tmp_path: Path) -> None:
    hf = save_model("glm4_moe", tmp_path / "hf", torch.bfloat16)
    imported(hf, tmp_path / "checkpoint")
    copy = "model.layers.4.embed_tokens.weight"

    def stale(tensors: Tensors) -> list[str]:
        tensors[copy][2, 3] += 1
        return [copy]

    changed(hf, stale)
    with pytest.raises(DataError, match=f"{copy}: not what model.embed_tokens.weight is") as error:
        verify_export(tmp_path / "checkpoint" / "megatron", hf, read_spec(hf))
    assert lines_of(error) == [copy]


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
def test_an_export_in_fp8_is_what_codes_make_of_the_weights(tmp_path: Path, scales: str) -> None:
    name = "deepseek_v3"
    hf = save_model(name, tmp_path / "hf", torch.bfloat16, **wide(name))
    imported(hf, tmp_path / "checkpoint")
    weights, spec = tmp_path / "checkpoint" / "megatron", read_spec(hf)
    fp8 = fp8_export(megatron_mapping(spec), scales)
    export(weights, tmp_path / "back", spec, hf, fp8=fp8)
    line = verify_export(weights, tmp_path / "back", spec, fp8=fp8)
    assert line.startswith("verified: ")
    with pytest.raises(DataError, match="parameters are not the checkpoint's"):
        verify_export(weights, tmp_path / "back", spec)
    spoiled = sorted(fp8.codes)[7]

    def one_code(tensors: Tensors) -> list[str]:
        tensors[spoiled].view(torch.uint8)[2, 5] ^= 1
        return [spoiled]

    changed(tmp_path / "back", one_code)
    with pytest.raises(DataError) as error:
        verify_export(weights, tmp_path / "back", spec, fp8=fp8)
    mapping = megatron_mapping(spec)
    names = [p for p in parameter_names(mapping) if spoiled in mapping.hf_names(p)]
    assert lines_of(error) == names


# --- log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([-1.0, -2.5, -0.25], "largest difference 0 (accepted: 0.001)"),
        ([-1.0, -2.5009, -0.25], "largest difference 0.0009 (accepted: 0.001)"),
        ([-1.0, -2.5011, -0.25], "differ by 0.0011, more than 0.001"),
        ([-1.002, -2.5, -0.25], "differ by 0.002, more than 0.001"),
        ([-1.0, -2.5, float("nan")], "differ by inf"),
        ([float("-inf"), -2.5, -0.25], "differ by inf"),
    ],
)
def test_log_probs_are_judged_by_their_largest_difference(theirs: list[float], says: str) -> None:
    ours = [-1.0, -2.5, -0.25]
    if "differ by" not in says:
        assert says in judge_logprobs(ours, theirs)
        return
    for one, other in ((ours, theirs), (theirs, ours), (theirs, theirs if "inf" in says else ours)):
        with pytest.raises(DataError, match=says):
            judge_logprobs(one, other)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "kimi_k2"])
def test_transformers_side_is_transformers(tmp_path: Path, name: str) -> None:
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)
    (sample,) = random_samples(1, 1, seed=4)
    (expected,) = reference_logprobs(hf, [sample])
    found = by_transformers(hf, sample.tokens.tolist())
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_log_probs_of_another_model_are_refused(
    plain: Path, plain_checkpoint: Path, tmp_path: Path
) -> None:
    """Both in processes of their own, on weights that pass every look at shapes."""
    spoiled = copy_of(plain, tmp_path / "spoiled")
    changed(spoiled, gate_for_up)
    with pytest.raises(DataError) as error:
        compare_logprobs(plain_checkpoint / "megatron", spoiled, read_spec(plain))
    found = re.search(
        r"not the same model: .*31 tokens .* differ by (\S+), more than 0.001", str(error.value)
    )
    assert found and 1e-3 < float(found[1]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "kimi_k2", "qwen3 yarn tied", "mistral"])
def test_log_probs_of_the_same_model_agree(tmp_path: Path, name: str) -> None:
    hf = save_model(name, tmp_path / "hf", torch.bfloat16)
    imported(hf, tmp_path / "checkpoint")
    line = compare_logprobs(tmp_path / "checkpoint" / "megatron", hf, read_spec(hf))
    found = re.search(r"of 31 tokens .* in float32: largest difference (\S+) ", line)
    assert found and 0 <= float(found[1]) < 2e-5


@pytest.mark.slow
def test_the_tools_say_what_they_verified(plain: Path, tmp_path: Path) -> None:
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    logprobs = r"log-probs of 31 tokens .*: largest difference \S+ \(accepted: 0.001\)\n"
    out = tool("convert_hf_to_megatron", plain, checkpoint)
    assert re.search(
        r"^verified: \d+ tensors, read back, are those of the source\n" + logprobs, out
    )
    out = tool("convert_megatron_to_hf", checkpoint, back)
    assert re.search(
        r"^verified: \d+ parameters, read back, are those of the checkpoint$", out, re.M
    )
    assert re.search("^" + logprobs, out, re.M)
    assert re.search(
        r"^identical to the imported weights: \d+ tensors by their digests$", out, re.M
    )


def tool(name: str, source: Path, out: Path) -> str:
    """What it prints with ``--verify``."""
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    command = [sys.executable, str(path), str(source), str(out), "--verify"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_what_does_not_fit_into_memory_is_not_compared(plain: Path, plain_checkpoint: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    needed = 2 * 4 * sum(t.numel() for t in tensors.values())
    weights, spec = plain_checkpoint / "megatron", read_spec(plain)
    line = compare_logprobs(weights, plain, spec, available=needed - 1)
    assert line.startswith("log-probs: not compared: twice the weights in float32 do not fit")


def test_a_model_that_takes_too_long_is_not_compared(
    plain: Path, plain_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow is not wrong: the conversion is published."""
    weights, spec = plain_checkpoint / "megatron", read_spec(plain)
    monkeypatch.setattr(verify, "_TIMEOUT_S", 0.01)
    line = compare_logprobs(weights, plain, spec)
    assert line == "log-probs: not compared: no answer by transformers within 0.01 s"


def test_fp8_is_not_compared(tmp_path: Path) -> None:
    source = save_model("qwen3_moe tied", tmp_path / "source")
    hf, _ = quantised(source, tmp_path / "hf")
    line = compare_logprobs(tmp_path / "none", hf, read_spec(hf))
    assert line.startswith("log-probs: not compared:") and "is in FP8" in line


def test_available_memory_is_at_most_the_machines() -> None:
    total = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    assert 0 < available_memory() <= int(total) * 1024
