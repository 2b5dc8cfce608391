"""The comparison of a kernel with its reference before its first use on a GPU; here the device is
the CPU, and the kernels are functions that do not compute what they should.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.ops import KERNELS, NativeMismatch, _native, _selfcheck, verify_all
from tests.helpers.op_calls import OpRecorder

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(
    _native.native_library() is None, reason="the compiled operators are not built"
)


@pytest.fixture
def registered(monkeypatch, tmp_path):
    """Registers checks for one test, with a cache folder and memory of its own; a counter of how
    often they ran.
    """
    runs: list[str] = []
    monkeypatch.setattr(_selfcheck, "_checks", dict(_selfcheck._checks))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def register(op: str, error: Exception | None = None) -> list[str]:
        @_selfcheck.self_check(op)
        def check(device: torch.device) -> None:
            runs.append(op)
            if error is not None:
                raise error

        return runs

    _selfcheck.verify.cache_clear()
    yield register
    _selfcheck.verify.cache_clear()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "_C.so"
    path.write_bytes(b"a build")
    return path


def again(op: str, library: Path | None) -> None:
    """As a new process would."""
    _selfcheck.verify.cache_clear()
    _selfcheck._digest.cache_clear()
    _selfcheck.verify(op, CPU, library)


def stamps(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "megarl").iterdir())


# --- what refuses ---------------------------------------------------------------------------------


def test_a_kernel_that_differs_is_refused_with_the_difference_every_time(
    registered, library, tmp_path
):
    runs = registered("bad", AssertionError("Mismatched elements: 3 / 7"))
    for _ in range(2):
        with pytest.raises(NativeMismatch, match=r"compiled bad does not agree .* on cpu") as error:
            _selfcheck.verify("bad", CPU, library)
        assert "Mismatched elements: 3 / 7" in str(error.value)
        assert "MEGARL_OPS=torch" in str(error.value)
    assert runs == ["bad", "bad"]
    assert not (tmp_path / "cache").exists(), "a failure was remembered as a success"


def test_a_kernel_that_does_not_start_is_refused_too(registered, library):
    registered("bad", RuntimeError("no kernel image is available for execution on the device"))
    with pytest.raises(NativeMismatch, match=r"compiled bad fails on cpu: no kernel image"):
        _selfcheck.verify("bad", CPU, library)


def test_an_op_without_a_check_is_refused(registered, library):
    with pytest.raises(NativeMismatch, match="bad has no self-check"):
        _selfcheck.verify("bad", CPU, library)


def test_a_real_check_notices_a_wrong_kernel(monkeypatch):
    exact = torch.ops.megarl.segment_sum
    off = torch.tensor(1e-6, dtype=torch.float64)

    class Wrong:
        segment_sum = staticmethod(lambda *given: exact(*given) + off)

    if _native.native_library() is None:
        pytest.skip("the compiled operators are not built")
    monkeypatch.setattr(torch.ops, "megarl", Wrong)
    with pytest.raises(NativeMismatch, match="segment_sum does not agree"):
        _selfcheck.run_check("segment_sum", CPU)


@needs_native
def test_every_kernel_is_called_by_a_check_and_passes_here():
    with OpRecorder() as recorder:
        for op in _selfcheck.checked_ops():
            _selfcheck.run_check(op, CPU)
    assert {call.op for call in recorder.calls} >= set(KERNELS)


# --- at the start of a run ------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_checked(registered):
    registered("bad", AssertionError())
    verify_all(CPU)


def test_at_the_start_every_kernel_of_the_device_is_checked(registered, library, monkeypatch):
    _selfcheck._checks.clear()
    for op in ("one", "two", "elsewhere"):
        runs = registered(op)
    cuda = torch.device("cuda")  # of which nothing is asked but its name and capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(
        _native,
        "native_devices",
        lambda op: frozenset({"cpu"} if op == "elsewhere" else {"cpu", "cuda"}),
    )
    monkeypatch.setattr(_native, "native_library", lambda: library)
    verify_all(cuda)
    assert runs == ["one", "two"]
    registered("two", AssertionError("off by one"))
    _selfcheck.verify.cache_clear()
    library.write_bytes(b"another build")
    _selfcheck._digest.cache_clear()
    with pytest.raises(
        NativeMismatch, match=r"compiled two does not agree .* some GPU: off by one"
    ):
        verify_all(cuda)


# --- what is remembered ---------------------------------------------------------------------------


def test_what_passed_is_not_repeated_by_later_processes(registered, library, tmp_path):
    runs = registered("fine")
    again("fine", library)
    again("fine", library)
    assert runs == ["fine"]
    (stamp,) = stamps(tmp_path)
    assert stamp.name.startswith(f"fine-cpu-torch{torch.__version__}-")


def test_another_build_torch_or_architecture_is_checked_anew(
    registered, library, tmp_path, monkeypatch
):
    runs = registered("fine")
    again("fine", library)
    library.write_bytes(b"another build")
    again("fine", library)
    assert len(runs) == 2
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    again("fine", library)
    assert len(runs) == 3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    _selfcheck.verify("fine", torch.device("cuda"), library)
    assert len(runs) == 4
    assert any("-sm100-torch2.99.0-" in stamp.name for stamp in stamps(tmp_path))


@pytest.mark.parametrize("content", [b"", b"pass", b"\xff\xfe\x00"])
def test_a_damaged_record_is_none(registered, library, tmp_path, content):
    runs = registered("fine")
    again("fine", library)
    (stamp,) = stamps(tmp_path)
    stamp.write_bytes(content)
    again("fine", library)
    assert runs == ["fine", "fine"]
    again("fine", library)  # written anew
    assert runs == ["fine", "fine"]


def test_a_folder_where_the_record_should_be_stops_nothing(registered, library, tmp_path):
    runs = registered("fine")
    again("fine", library)
    (stamp,) = stamps(tmp_path)
    stamp.unlink()
    stamp.mkdir()
    again("fine", library)
    again("fine", library)
    assert runs == ["fine"] * 3
    assert stamps(tmp_path) == [stamp], "a temporary file was left"


def test_a_cache_that_cannot_be_written_stops_nothing(registered, library, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    runs = registered("fine")
    with caplog.at_level(logging.INFO):
        again("fine", library)
    again("fine", library)
    assert runs == ["fine", "fine"]
    assert "is not remembered" in caplog.text


def test_without_a_home_directory_nothing_is_remembered(registered, library, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    runs = registered("fine")
    again("fine", library)
    again("fine", library)
    assert runs == ["fine", "fine"]


RANK = """
import sys, torch
from pathlib import Path
from megarl.ops import _selfcheck
_selfcheck.self_check("fine")(lambda device: None)
for _ in range(200):
    _selfcheck.verify.cache_clear()
    _selfcheck.verify("fine", torch.device("cpu"), Path(sys.argv[1]))
    stamp = _selfcheck._stamp("fine", torch.device("cpu"), Path(sys.argv[1]))
    stamp.unlink(missing_ok=True)  # so that all of them write again and again
_selfcheck.verify.cache_clear()
_selfcheck.verify("fine", torch.device("cpu"), Path(sys.argv[1]))
"""


def test_ranks_may_check_and_remember_at_the_same_time(library, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "MEGARL_OPS": "torch",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(library)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    names = [stamp.name for stamp in stamps(tmp_path)]
    assert all(name.startswith("fine-cpu-") for name in names), "a temporary file was left"
