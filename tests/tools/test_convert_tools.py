"""The converters as programs: what they say, and when. No Megatron is needed."""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.workers import Workers
from megarl.convert import Conversion, Export, Import, Quantisation, perform
from megarl.errors import DataError
from tests.helpers.families import save_model, wide
from tests.helpers.tools import tool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "qwen3_moe yarn"
    return save_model(name, tmp_path_factory.mktemp("m") / "hf", torch.bfloat16, **wide(name))


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("c") / "checkpoint"
    Import(model).run(out, Workers())
    return out


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    code: int = tool(name).main()
    return code


WAYS = ["convert_hf_to_megatron", "convert_megatron_to_hf", "quantize_hf_fp8"]


@pytest.mark.parametrize("name", WAYS)
def test_a_dry_run_of_several_processes_is_said_once_with_every_share(
    model: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    source = checkpoint if name == "convert_megatron_to_hf" else model
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert run(monkeypatch, name, source, tmp_path / "out", "--dry-run") == 0
        said.append(capsys.readouterr().out)
    assert said[0] and said[1:] == ["", ""]
    shares = 0 if name == "quantize_hf_fp8" else 3
    assert [f"process {rank}: " in said[0] for rank in range(4)] == [r < shares for r in range(4)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WAYS[:2])
def test_a_dry_run_verifies_nothing_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, name, tmp_path, tmp_path / "out", "--dry-run", "--verify")
    assert "--verify has no effect with --dry-run" in capsys.readouterr().err


def test_a_dry_run_finds_that_a_checkpoint_lacks_weights(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    shutil.rmtree(source / "megatron")
    assert run(monkeypatch, "convert_megatron_to_hf", source, tmp_path / "out", "--dry-run") == 1
    assert "megatron is not a Megatron distributed checkpoint" in capsys.readouterr().err


def test_damaged_digests_are_found_before_anything_is_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    (source / "digests.json").write_text("{")
    with pytest.raises(DataError, match=r"digests\.json"):
        Export(source)


def test_what_a_file_fails_of_is_a_line(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "weights")

    monkeypatch.setattr("megarl.convert.export_weights", full)
    assert run(monkeypatch, "convert_megatron_to_hf", checkpoint, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert said == "convert_megatron_to_hf: [Errno 28] No space left on device: 'weights'\n"
    assert not list(tmp_path.iterdir())


def test_sizes_are_those_of_the_files(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Room is asked for what is written: codes are half as large."""
    ways: dict[str, Conversion] = {
        "plain": Export(checkpoint),
        "export": Export(checkpoint, "f32"),
        "quantised": Quantisation(model, "f32"),
    }
    for name, conversion in ways.items():
        conversion.run(tmp_path / name, Workers())
        written = (tmp_path / name / "model.safetensors").stat().st_size
        header = 8 + int.from_bytes(
            (tmp_path / name / "model.safetensors").read_bytes()[:8], "little"
        )
        assert conversion.num_bytes == written - header, name


@pytest.mark.parametrize("verify", [False, True])
def test_progress_ends_when_all_is_done(
    model: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: bool,
) -> None:
    monkeypatch.setattr("megarl.convert.compare_logprobs", lambda *_: "not compared")
    ways: list[Conversion] = [Import(model, verify=verify), Export(checkpoint, verify=verify)]
    ways += [] if verify else [Quantisation(model, "f32")]
    for number, conversion in enumerate(ways):
        told: list[int] = []

        def shown(what: str, num_bytes: int, told: list[int] = told) -> object:
            told.append(-num_bytes)
            return nullcontext(told.append)

        monkeypatch.setattr("megarl.convert.progress", shown)
        perform(conversion, tmp_path / str(number), 2, 60)
        assert len(told) > 10 and sum(told) == 0, type(conversion)
