"""segment_sum: the compiled kernel against its reference, both against closed forms.

Every case runs for each implementation there is; comparisons are bitwise unless they say otherwise,
because the order of the additions is part of the definition.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, segment_sum, segment_sum_ref

NATIVE = "cpu" in _native.native_devices("segment_sum")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")
ROOT = Path(__file__).resolve().parents[2]


def native(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.ops.megarl.segment_sum(values, cu_seqlens)


both = pytest.mark.parametrize("op", [pytest.param(native, marks=needs_native), segment_sum_ref])


def cu(*entries: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(entries, dtype=dtype)


def bits(x: Tensor) -> list[int]:
    """Bit patterns: tells -0.0 from 0.0 and compares NaNs, which == does not."""
    return x.contiguous().view(torch.int64).tolist()


def ragged(num_tokens: int, num_segments: int, generator: torch.Generator) -> Tensor:
    """Bounds i64 of sequences of random lengths, some of them empty."""
    inner = torch.randint(0, num_tokens + 1, (num_segments - 1,), generator=generator)
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([num_tokens])])


def left_to_right(numbers: list[float]) -> float:
    total = 0.0
    for number in numbers:  # not sum(): from Python 3.12 on it compensates for rounding
        total += number
    return total


# --- closed forms ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound_dtype", [torch.int32, torch.int64])
def test_sums_each_sequence_in_float64(op, value_dtype, bound_dtype):
    values = torch.tensor([1, 2, 3, 10, 20, 100], dtype=value_dtype)
    out = op(values, cu(0, 3, 5, 6, dtype=bound_dtype))
    assert out.dtype == torch.float64
    assert out.tolist() == [6.0, 30.0, 100.0]


@both
def test_float32_integers_beyond_two_to_the_24_are_summed_exactly(op):
    # In float32 arithmetic 2^24 + 1 is 2^24 and the ones would vanish.
    values = torch.ones(1001, dtype=torch.float32)
    values[0] = 2.0**24
    assert op(values, cu(0, 1001)).tolist() == [2.0**24 + 1000]


@both
def test_additions_go_left_to_right(op):
    # 1 is lost against 1e16 when it comes after it, kept when 1e16 has gone again.
    values = torch.tensor([1e16, 1.0, -1e16, 1e16, -1e16, 1.0], dtype=torch.float64)
    assert op(values, cu(0, 3, 6)).tolist() == [0.0, 1.0]


@both
def test_empty_and_repeated_sequences_sum_to_zero(op):
    values = torch.tensor([1.0, 2.0, 4.0])
    assert op(values, cu(0, 0, 0, 2, 2, 3, 3)).tolist() == [0.0, 0.0, 3.0, 0.0, 4.0, 0.0]


@both
def test_a_row_without_tokens_or_without_sequences(op):
    empty = torch.empty(0)
    assert op(empty, cu(0, 0, 0)).tolist() == [0.0, 0.0]
    assert op(empty, cu(0)).shape == (0,)


@both
def test_a_nan_stays_in_its_sequence(op):
    out = op(torch.tensor([1.0, float("nan"), 2.0]), cu(0, 1, 2, 3))
    assert out.isnan().tolist() == [False, True, False]


@both
def test_strided_values_and_bounds(op):
    values = torch.arange(12.0)[::2]  # 0 2 4 6 8 10
    bounds = torch.tensor([0, -1, 2, -1, 6, -1], dtype=torch.int64)[::2]
    assert op(values, bounds).tolist() == [2.0, 28.0]


# --- native against reference ---------------------------------------------------------------------

rows = st.tuples(
    st.integers(0, 300), st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 2**31)
)


@needs_native
@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from([torch.float32, torch.float64]))
def test_native_and_reference_equal_a_plain_loop_bitwise(row, dtype):
    num_tokens, cuts, seed = row
    inner = sorted(round(c * num_tokens) for c in cuts)
    bounds = torch.tensor([0, *inner, num_tokens], dtype=torch.int64)
    values = torch.randn(
        num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)
    expected = [left_to_right(values[a:b].tolist()) for a, b in pairwise(bounds.tolist())]
    expected_bits = bits(torch.tensor(expected, dtype=torch.float64))
    assert bits(segment_sum_ref(values, bounds)) == expected_bits
    assert bits(native(values, bounds)) == expected_bits


@needs_native
def test_thread_count_changes_no_bit():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator)
    bounds = ragged(200_000, 64, generator)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            results.append(bits(native(values, bounds)))
    finally:
        torch.set_num_threads(before)
    assert results == [bits(segment_sum_ref(values, bounds))] * 4


@needs_native
def test_opcheck():
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.megarl.segment_sum, (values, cu(0, 3, 3, 7)))
    torch.library.opcheck(torch.ops.megarl.segment_sum, (torch.randn(0), cu(0, 0)))


@needs_native
def test_the_public_function_runs_the_kernel(monkeypatch):
    # The references must not be what a normal installation runs.
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("segment_sum ran the reference although the kernel is loaded")

    monkeypatch.setattr(sys.modules["megarl.ops.segment_sum"], "segment_sum_ref", refuse)
    assert segment_sum(torch.ones(3), cu(0, 3)).tolist() == [3.0]


@needs_native
def test_compiles_without_a_graph_break():
    explanation = torch._dynamo.explain(segment_sum)(torch.ones(5, requires_grad=True), cu(0, 2, 5))
    assert explanation.graph_break_count == 0, explanation.break_reasons


# --- gradients ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("bounds", [(0, 6), (0, 3, 3, 6), (0, 0, 6, 6)])
def test_gradcheck_first_and_second_order(op, bounds):
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def curved(v: Tensor) -> Tensor:  # a sum alone has no second derivative to get wrong
        return op(v.square(), cu(*bounds)).exp()

    assert torch.autograd.gradcheck(curved, (values,))
    assert torch.autograd.gradgradcheck(curved, (values,))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_token_gets_the_gradient_of_its_sequence_in_its_own_dtype(op, dtype):
    values = torch.zeros(7, dtype=dtype, requires_grad=True)
    out = op(values, cu(0, 1, 3, 3, 7))
    out.backward(torch.tensor([7.0, 2.0, 50.0, 0.1], dtype=torch.float64))
    tenth = torch.tensor(0.1, dtype=torch.float64).to(dtype).item()
    assert values.grad.dtype == dtype
    assert values.grad.tolist() == [7.0, 2.0, 2.0, tenth, tenth, tenth, tenth]


@both
def test_a_row_without_tokens_has_an_empty_gradient(op):
    values = torch.zeros(0, requires_grad=True)
    op(values, cu(0, 0)).sum().backward()
    assert values.grad.shape == (0,)


# --- errors carry the numbers ---------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("values", "bounds", "message"),
    [
        (torch.ones(4), cu(-1, 4), "must start at 0, got -1"),
        (torch.ones(4), cu(1, 4), "must start at 0, got 1"),
        (torch.ones(4), cu(0, 3), "must end at the 4 tokens, got 3 as its last entry"),
        (torch.ones(0), cu(0, 3), "must end at the 0 tokens, got 3 as its last entry"),
        (torch.ones(9), cu(0, 5, 3, 9), "must not decrease, got 5 then 3 at entries 1 and 2"),
        (torch.ones(4), cu(0, 2, 5), "must end at the 4 tokens, got 5 as its last entry"),
        (torch.ones(4), cu(), "at least 1 entry, got 0"),
        (torch.ones(2, 2), cu(0, 4), "values must have 1 dimension.s., got 2"),
        (torch.ones(4).half(), cu(0, 4), "must be float32 or float64, got (Half|torch.float16)"),
        (torch.ones(4), torch.tensor([0.0]), "must be int32 or int64, got (Float|torch.float32)"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(op, values, bounds, message):
    with pytest.raises(RuntimeError, match=message) as error:
        op(values, bounds)
    assert "segment_sum: " in str(error.value)


# --- CUDA (run where there is a GPU; see docs/gpu-verification.md) --------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the tests below.
    assert "cuda" in _native.native_devices("segment_sum"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound_dtype", [torch.int32, torch.int64])
def test_cuda_kernel_equals_the_reference_and_repeats_its_bits(cuda, value_dtype, bound_dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_003, generator=generator, dtype=value_dtype)
    bounds = ragged(100_003, 40, generator).to(bound_dtype)
    first = segment_sum(values.to(cuda), bounds.to(cuda))
    # Another order of the same float64 additions: up to 1e5 of them, each within 1.1e-16.
    torch.testing.assert_close(first.cpu(), segment_sum_ref(values, bounds), rtol=1e-11, atol=1e-9)
    for _ in range(5):
        assert bits(segment_sum(values.to(cuda), bounds.to(cuda)).cpu()) == bits(first.cpu())


@pytest.mark.gpu
def test_cuda_kernel_prints_a_bad_bound_and_stops(cuda):
    # In a process of its own: a trap ends the CUDA context.
    code = (
        "import torch; from megarl.ops import segment_sum\n"
        "segment_sum(torch.ones(4).cuda(), torch.tensor([0, 3, 9]).cuda()).sum().item()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode != 0
    assert "4 tokens; got 3 then 9 at entries 1 and 2" in run.stdout + run.stderr


# --- the extension's absence ----------------------------------------------------------------------

PROBE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
import torch
from megarl.ops import _native, call_counts, segment_sum
_native.native_library(); _native.native_devices("segment_sum")
print(segment_sum(torch.ones(3), torch.tensor([0, 1, 3])).tolist())
print(sorted({m.split(".")[0] for m in sys.modules} & {"megatron", "transformers", "aiohttp"}))
print(call_counts())
"""


def probe(package: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=package,
        env={k: v for k, v in os.environ.items() if k != "MEGARL_OPS"} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def not_built(tmp_path: Path) -> Path:
    """The package as it is where nothing was compiled."""
    (tmp_path / "megarl").mkdir()
    shutil.copy(ROOT / "megarl" / "__init__.py", tmp_path / "megarl")
    shutil.copytree(ROOT / "megarl" / "ops", tmp_path / "megarl" / "ops")
    return tmp_path


def test_absence_is_reported_once_with_reason_and_remedy_and_is_not_fatal(not_built):
    run = probe(not_built)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[1.0, 2.0]", "[]", "{'segment_sum': {'torch': 1}}"]
    reports = [line for line in run.stderr.splitlines() if "compiled operators" in line]
    assert len(reports) == 1, run.stderr
    assert "WARNING" in reports[0]
    assert f"there is no _C*.so in {not_built}" in reports[0]
    assert _native.BUILD_COMMAND in reports[0]


def test_absence_is_fatal_where_the_extension_is_required(not_built):
    run = probe(not_built, MEGARL_OPS="native")
    assert run.returncode != 0
    assert re.search(r"ImportError: MEGARL_OPS=native, but .*there is no _C", run.stderr), (
        run.stderr
    )


def test_references_can_be_asked_for():
    run = probe(MEGARL_OPS="torch")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "{'segment_sum': {'torch': 1}}"
    assert "INFO MEGARL_OPS=torch: every op runs its torch reference" in run.stderr


def test_a_choice_that_is_none_is_refused():
    run = probe(MEGARL_OPS="cuda")
    assert run.returncode != 0
    assert "MEGARL_OPS='cuda'; accepted: native, torch" in run.stderr


@needs_native
def test_presence_is_silent():
    run = probe(MEGARL_OPS="native")
    assert run.returncode == 0, run.stderr
    assert "compiled operators" not in run.stderr
    assert run.stdout.splitlines() == ["[1.0, 2.0]", "[]", "{'segment_sum': {'native': 1}}"]


@needs_native
def test_a_library_older_than_its_sources_is_reported(caplog, monkeypatch):
    monkeypatch.delenv("MEGARL_OPS", raising=False)
    with caplog.at_level(logging.WARNING, logger="megarl.ops._native"):
        assert _native.native_devices("no_such_op") == frozenset()
    assert "it has no no_such_op" in caplog.text
    monkeypatch.setenv("MEGARL_OPS", "native")
    with pytest.raises(ImportError, match="it has no other_op"):
        _native.native_devices("other_op")
