"""tools/quantize_hf_fp8.py: the folder it writes, what it refuses, its memory, and that nothing is
left behind.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from tests.checkpoint.test_streamed_memory import CONFIG
from tests.conftest import ROOT
from tests.helpers.fp8_blocks import edit_config, quantised, raw_header
from tests.ops.test_fp8_block import plain_quant
from tests.tools.conftest import Quantize


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
def test_codes_are_those_of_the_definition_and_other_files_stay(
    quantize: Quantize, moe: Path, tmp_path: Path, scales: str
) -> None:
    source = shutil.copytree(moe, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_own.py").write_text("raise SystemExit('was run')")
    assert quantize(source, tmp_path / "out", "--scales", scales) is None
    for name in ("tokenizer.json", "modeling_own.py", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out")
    )
    said = after.pop("quantization_config")
    assert before == after and said.get("scale_fmt") == {"power_of_two": "ue8m0"}.get(scales)
    weights = load_file(source / "model.safetensors")
    for name, (dtype, _, raw) in raw_header(tmp_path / "out" / "model.safetensors").items():
        if dtype == "F8_E4M3":
            plain = weights[name].float().numpy()
            codes, its_scales = plain_quant(plain, 128, 128, 0.0, scales == "power_of_two")
            assert raw == codes.tobytes(), name
            found = raw_header(tmp_path / "out" / "model.safetensors")[f"{name}_scale_inv"]
            assert found[2] == its_scales.tobytes(), name


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def another_shape(folder: Path) -> None:
    edit_config(folder, moe_intermediate_size=256)


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.experts.7.down_proj.weight"][5, 7] = float("inf")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_a_tensor, "missing model.layers.2.mlp.experts.5.up_proj.weight [128, 128]"),
        (cut_short, "model.safetensors"),
        (another_shape, "found [128, 128]; config.json implies [256, 128]"),
        (not_finite, "experts.7.down_proj.weight has no FP8 codes: x must be finite, got 1 val"),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_is_left(
    quantize: Quantize, moe: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    source = shutil.copytree(moe, tmp_path / "source")
    damage(source)
    found = quantize(source, tmp_path / "out")
    assert found is not None and said in found
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_fp8_is_not_quantised_again(quantize: Quantize, moe: Path, tmp_path: Path) -> None:
    folder, _ = quantised(moe, tmp_path / "other_blocks")
    assert quantize(moe, tmp_path / "ours") is None
    for source in (folder, tmp_path / "ours"):
        found = quantize(source, tmp_path / "out")
        assert found is not None and f"{source} is in FP8 already" in found
        assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_never_overwritten(
    quantize: Quantize, moe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    found = quantize(moe, out)
    assert found is not None and "already exists" in found
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (out / "mine").exists()


# ---- a large folder ------------------------------------------------------------------------------

TOOL = ROOT / "tools" / "quantize_hf_fp8.py"
LARGEST = 19200 * 1024 * 2  # bytes of the embedding, and of the head
UNDER = """
import resource, runpy, signal, sys
import megarl.convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background ignore
allowed, tool, *rest = sys.argv[1:]
size = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + int(allowed),) * 2)
sys.argv = [tool, *rest]
runpy.run_path(tool, run_name="__main__")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB, of which the embedding is a fifth."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    specs = mapping_for(read_spec(folder)).hf_spec()
    each = ((s.name, torch.full(s.shape, 1 / 3, dtype=torch.bfloat16)) for s in specs)
    write_checkpoint(folder / "model", each, specs, folder)
    return folder / "model"


def started(large: Path, out: Path, allowed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", UNDER, allowed, TOOL, large, out, "--threads", 1]
    return subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)


def test_memory_is_bounded_by_the_largest_tensor(large: Path, tmp_path: Path) -> None:
    run = started(large, tmp_path / "out", LARGEST * 3 // 2 + 32 * 2**20)
    assert (run.communicate(timeout=120)[1], run.returncode) == ("", 0)
    size = sum(f.stat().st_size for f in large.glob("*.safetensors"))
    assert size > 2 * (LARGEST * 3 // 2 + 32 * 2**20)
    run = started(large, tmp_path / "less", LARGEST // 2)  # the limit holds
    said = run.communicate(timeout=120)[1]
    assert re.search("MemoryError|can't allocate memory", said) and run.returncode
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(
    large: Path, tmp_path: Path, how: int, code: int
) -> None:
    run = started(large, tmp_path / "out", 2**40)
    while not list(tmp_path.glob(".out.part/model*")):
        assert run.poll() is None
        time.sleep(0.002)
    os.kill(run.pid, how)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == code and ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
    assert not list(tmp_path.iterdir())
