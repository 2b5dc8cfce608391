"""What policy_loss and policy_sums take and refuse, without tokens, in other layouts, and on CUDA.

What they compute: ``test_policy_loss.py``.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.ops import _native
from megarl.ops.policy_loss import (
    OBJECTIVES,
    PARAMETERS,
    SUMS,
    TOTALS,
    PolicyRow,
    PolicyTerms,
    policy_loss,
    policy_sums,
)
from tests.ops.plain_policy import REALS
from tests.ops.policy_rows import KINDS, row, terms, without

pytestmark = pytest.mark.skipif(
    not _native.native_devices("policy_loss"), reason="the compiled operators are not built"
)

Op = Callable[[PolicyRow, PolicyTerms], Any]
both = pytest.mark.parametrize("op", [policy_loss, policy_sums])
ROWS = (*REALS, "mask", "selected")
TOKENS = len(row().mask)


def bits(*tensors: Tensor) -> list[bytes]:
    return [x.detach().cpu().contiguous().numpy().tobytes() for x in tensors]


def refused(op: Op, given: PolicyRow, given_terms: PolicyTerms, *words: str) -> None:
    with pytest.raises(RuntimeError) as error:
        op(given, given_terms)
    for word in (f"{op.__name__}: ", *words):
        assert word in str(error.value)


# --- rows that are taken --------------------------------------------------------------------------


@pytest.mark.parametrize("num_segments", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_row_without_tokens(objective, dtype, num_segments):
    empty = row(dtype=dtype, lengths=(0,) * num_segments)
    assert len(empty.cu_seqlens) == num_segments + 1
    for given in (empty, without(empty, "correction")):
        found = policy_loss(given, terms(objective))
        assert found.grad_logprobs.shape == found.grad_entropy.shape == (0,)
        assert found.grad_logprobs.dtype == dtype
        assert found.sums.shape == (len(SUMS), num_segments)
        assert (found.sums == 0).all()
        assert found.totals.tolist() == [0.0] * (len(TOTALS) - 2) + [math.inf, -math.inf]
        assert bits(policy_sums(given, terms(objective))) == bits(found.sums)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_the_arguments_change_no_bit(kind):
    """Strided rows, strided bounds, bounds of either type."""
    whole = row(kind, torch.float32)
    spaced = {
        f.name: torch.stack([x, x], 1)[:, 0]
        for f in fields(whole)
        if (x := getattr(whole, f.name)) is not None
    }
    strided = PolicyRow(**spaced)
    assert not any(x.is_contiguous() for x in strided.tensors() if x is not None)
    wide = replace(strided, cu_seqlens=strided.cu_seqlens.long())
    for objective in OBJECTIVES:
        expected = bits(*policy_loss(whole, terms(objective)))
        assert bits(*policy_loss(strided, terms(objective))) == expected
        assert bits(*policy_loss(wide, terms(objective))) == expected
        sums = policy_sums(wide, terms(objective))
        spaced_sums = torch.stack([sums, sums], 2)[:, :, 0]
        assert not spaced_sums.is_contiguous()
        expected = bits(*policy_loss(whole, terms(objective), sums))
        assert bits(*policy_loss(strided, terms(objective), spaced_sums)) == expected


def test_outputs_are_data_whatever_requires_grad():
    whole = row(dtype=torch.float32)
    attached = {n: getattr(whole, n).clone().requires_grad_() for n in REALS}
    moving = replace(whole, **attached)
    found = policy_loss(moving, terms("minirl"))
    assert not any(x.requires_grad for x in (*found, policy_sums(moving, terms("minirl"))))
    assert bits(*found) == bits(*policy_loss(whole, terms("minirl")))


def test_nothing_that_is_handed_in_is_written():
    whole, given_terms = row("far", torch.float32), terms("gmpo")
    sums = policy_sums(whole, given_terms)
    inputs = [x for x in (*whole.tensors(), sums) if x is not None]
    before = bits(*inputs)
    found = policy_loss(whole, given_terms, sums)
    assert bits(*inputs) == before
    addresses = {x.data_ptr() for x in inputs}
    assert not addresses & {x.data_ptr() for x in found}


def test_opcheck():
    for objective, changes in (("minirl", {}), ("gspo", {"entropy_coef": 0.0})):
        given_terms = terms(objective, **changes)
        arguments = (*row(dtype=torch.float32).tensors(), *given_terms.codes())
        torch.library.opcheck(torch.ops.megarl.policy_sums, arguments)
        sums = policy_sums(row(dtype=torch.float32), given_terms)
        for given in (None, sums):
            torch.library.opcheck(torch.ops.megarl.policy_loss, (*arguments, given))


# --- rows that are refused ------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_another_shape_are_refused(op, name):
    values = getattr(row(), name)
    for bad in (values[:-1], values.repeat(2), values[:0]):
        found = (str(len(bad)), str(TOKENS))
        refused(op, replace(row(), **{name: bad}), terms("minirl"), *found)
    for bad in (values[None], values[:, None], values[0]):
        words = f"{name} must have 1 dimension(s), got {bad.dim()}"
        refused(op, replace(row(), **{name: bad}), terms("minirl"), words)


@both
@pytest.mark.parametrize("name", REALS)
def test_rows_of_another_type_are_refused(op, name):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool):
        if name == "logprobs" and dtype == torch.float32:
            continue
        bad = replace(row(), **{name: getattr(row(), name).to(dtype)})
        refused(op, bad, terms("minirl"), f"{name} must be", "got")
    # all of one type that is none of the two
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        bad = replace(row(), **{n: getattr(row(), n).to(dtype) for n in REALS})
        refused(op, bad, terms("minirl"), "logprobs must be float32 or float64, got")


@both
@pytest.mark.parametrize("name", ["mask", "selected"])
def test_masks_of_another_type_are_refused(op, name):
    for dtype in (torch.uint8, torch.int64, torch.float32):
        bad = replace(row(), **{name: getattr(row(), name).to(dtype)})
        refused(op, bad, terms("gspo"), f"{name} must be bool, got")


@both
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, TOKENS], "must start at 0, got 1"),
        ([-1, TOKENS], "must start at 0, got -1"),
        ([TOKENS], f"must start at 0, got {TOKENS}"),
        ([0], f"must end at the {TOKENS} tokens, got 0"),
        ([0, TOKENS - 1], f"must end at the {TOKENS} tokens, got {TOKENS - 1}"),
        ([0, 5, TOKENS + 1], f"must end at the {TOKENS} tokens, got {TOKENS + 1}"),
        ([0, 7, 5, TOKENS], "must not decrease, got 7 then 5 at entries 1 and 2"),
        ([0, TOKENS, 0, TOKENS], f"must not decrease, got {TOKENS} then 0 at entries 1 and 2"),
        ([0, 2**31 - 1, TOKENS], f"must not decrease, got {2**31 - 1} then {TOKENS}"),
        ([0, -(2**31), TOKENS], f"must not decrease, got 0 then {-(2**31)}"),
        ([], "must have at least 1 entry, got 0"),
    ],
)
def test_bounds_that_are_none_are_refused(op, bounds, message):
    for dtype in (torch.int32, torch.int64):
        bad = replace(row(), cu_seqlens=torch.tensor(bounds, dtype=dtype))
        refused(op, bad, terms("gspo"), f"cu_seqlens {message}")


@both
@pytest.mark.parametrize("name", [*ROWS, "cu_seqlens"])
def test_rows_on_another_device_are_refused(op, name):
    for objective in ("sft", "gspo", "minirl"):
        bad = replace(row(), **{name: getattr(row(), name).to("meta")})
        refused(op, bad, terms(objective), "must be on the device of the others", "meta", "cpu")


@both
def test_bounds_of_another_shape_or_type_are_refused(op):
    bounds = row().cu_seqlens
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        bad = replace(row(), cu_seqlens=bounds.to(dtype))
        refused(op, bad, terms("gspo"), "cu_seqlens must be int32 or int64, got")
    for x in (bounds[None], bounds[:, None], bounds[0]):
        bad = replace(row(), cu_seqlens=x)
        refused(op, bad, terms("gspo"), f"cu_seqlens must have 1 dimension(s), got {x.dim()}")


@both
def test_rows_that_the_terms_read_must_be_given(op):
    quiet = dict(kl_type="", opsm="", entropy_coef=0.0)
    bare = without(row(), "rollout_logprobs", "ref_logprobs", "correction", "entropy", "selected")
    for objective in OBJECTIVES:
        if objective not in ("minirl", "kl_cov"):
            op(bare, terms(objective, **quiet))
    needs = [
        (bare, terms("minirl", **quiet), "rollout_logprobs"),
        (bare, terms("gspo", **quiet | {"opsm": "rollout"}), "rollout_logprobs"),
        (replace(bare, correction=row().correction), terms("gspo", **quiet), "rollout_logprobs"),
        *((bare, terms("sft", **quiet | {"kl_type": k}), "ref_logprobs") for k in ("k1", "k3+")),
        (bare, terms("sft", **quiet | {"entropy_coef": -1.0}), "entropy"),
        (bare, terms("sft", **quiet | {"entropy_coef": math.nan}), "entropy"),
        (bare, terms("kl_cov", **quiet), "selected"),
    ]
    for given, given_terms, name in needs:
        refused(op, given, given_terms, f"{name} must be given, the loss reads it")


@pytest.mark.parametrize("name", ["policy_sums", "policy_loss"])
def test_codes_and_parameters_that_are_none_are_refused(name):
    op = getattr(torch.ops.megarl, name)
    tail = (None,) if name == "policy_loss" else ()
    tensors, (numbers, *codes) = row().tensors(), terms("gspo").codes()
    for bad in (numbers[:-1], numbers[:0], numbers.repeat(2)):
        with pytest.raises(RuntimeError, match=f"{name}: parameters must be 16 .* got {len(bad)}"):
            op(*tensors, bad, *codes, *tail)
    for bad in (numbers.float(), numbers.half(), numbers.long()):
        with pytest.raises(RuntimeError, match=f"{name}: parameters must be float64, got"):
            op(*tensors, bad, *codes, *tail)
    for bad in (numbers[None], numbers[:, None], numbers[0]):
        with pytest.raises(RuntimeError, match=f"{name}: parameters must have 1 dimension"):
            op(*tensors, bad, *codes, *tail)
    for at, code in enumerate(("objective", "kl_type", "kl_weight", "opsm")):
        for bad in (-1, 99, 2**62):
            with pytest.raises(RuntimeError, match=f"{name}: {code} must be 0 to .*, got {bad}"):
                op(*tensors, numbers, *codes[:at], bad, *codes[at + 1 :], *tail)


def test_names_that_are_none_are_refused():
    for what in ("objective", "kl_type", "kl_weight", "opsm"):
        for bad in ("none such", "K3", "ppo"):
            with pytest.raises(ValueError, match=f"policy_loss: {what} '{bad}'; accepted: "):
                replace(terms("gspo"), **{what: bad}).codes()
    for bad in ("eps_low", "LOW", ""):
        with pytest.raises(ValueError, match=rf"policy_loss: parameters \['{bad}'\]; accepted: "):
            PolicyTerms("sft", {bad: 1.0}).codes()
    assert PolicyTerms("sft").codes()[0].tolist() == [0.0] * len(PARAMETERS)


def test_sums_of_another_shape_or_type_are_refused():
    whole = row()
    sums = policy_sums(whole, terms("gspo"))
    count = len(whole.cu_seqlens) - 1
    for bad in (sums[:-1], sums[:, :-1], sums.T.contiguous(), sums[:, :0]):
        shape = f"must be [{len(SUMS)}, {count}], got [{bad.shape[0]}, {bad.shape[1]}]"
        with pytest.raises(RuntimeError) as error:
            policy_loss(whole, terms("gspo"), bad)
        assert f"policy_loss: sequence_sums {shape}" in str(error.value)
    for bad in (sums.float(), sums.long(), sums.half()):
        with pytest.raises(RuntimeError, match="policy_loss: sequence_sums must be float64, got"):
            policy_loss(whole, terms("gspo"), bad)
    for bad in (sums[0], sums[None], sums[0, 0]):
        with pytest.raises(RuntimeError, match=r"sequence_sums must have 2 dimension\(s\), got"):
            policy_loss(whole, terms("gspo"), bad)


# --- CUDA (run where there is a GPU; see docs/gpu-verification.md) --------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the torch form would pass the tests elsewhere.
    assert "cuda" in _native.native_devices("policy_loss"), "the CUDA kernel is not built"
    return torch.device("cuda")


def moved(given: PolicyRow, device: torch.device) -> PolicyRow:
    return PolicyRow(**{n: None if x is None else x.to(device) for n, x in vars(given).items()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_cuda_kernels_equal_the_cpu_and_repeat_their_bits(cuda, objective, dtype):
    # sums in another order; the compiler's own exp arithmetic is the header's
    tolerance = (
        dict(rtol=2e-6, atol=1e-9) if dtype == torch.float32 else dict(rtol=1e-9, atol=1e-12)
    )
    for kind in KINDS:
        for changes in ({}, dict(kl_type="", opsm="", entropy_coef=0.0), dict(all_metrics=False)):
            whole, given_terms = row(kind, dtype, (0, 700, 3, 256, 0)), terms(objective, **changes)
            there = moved(whole, cuda)
            expected, found = policy_loss(whole, given_terms), policy_loss(there, given_terms)
            for name in ("grad_logprobs", "grad_entropy", "totals"):
                computed = getattr(found, name).cpu()
                torch.testing.assert_close(computed, getattr(expected, name), **tolerance)
            sums = policy_sums(there, given_terms)
            torch.testing.assert_close(
                sums.cpu(), policy_sums(whole, given_terms), rtol=1e-9, atol=1e-9
            )
            for _ in range(3):
                assert bits(*policy_loss(there, given_terms)) == bits(*found)
                assert bits(policy_sums(there, given_terms)) == bits(sums)


@pytest.mark.gpu
def test_cuda_kernels_take_rows_without_tokens(cuda):
    for lengths in ((), (0,), (0, 0, 0)):
        empty = moved(row(lengths=lengths), cuda)
        totals = policy_loss(empty, terms("gspo")).totals.tolist()
        assert totals == [0.0] * (len(TOTALS) - 2) + [math.inf, -math.inf]
    bad = replace(moved(row(), cuda), cu_seqlens=torch.tensor([0], device=cuda))
    refused(policy_loss, bad, terms("gspo"), f"must end at the {TOKENS} tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["policy_loss", "policy_sums"])
def test_cuda_kernels_print_a_bad_bound_and_stop(cuda, op):
    # In a process of its own: a trap ends the CUDA context.
    code = (
        "import torch; from megarl.ops.policy_loss import *\n"
        "x = torch.ones(4).cuda()\n"
        "row = PolicyRow(x, x, x, x, x > 0, torch.tensor([0, 3, 9]).cuda())\n"
        f"print({op}(row, PolicyTerms('sft'))[0].sum().item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode != 0
    assert f"{op}: " in run.stdout + run.stderr
    assert "4 tokens; got 3 then 9 at entries 1 and 2" in run.stdout + run.stderr
