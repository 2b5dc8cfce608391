"""gae, its adjoint and discounted_returns refuse bad arguments with what was found, by kernel and
reference alike.
"""

import math

import pytest
import torch

from megarl.ops import _native, discounted_returns_ref, gae_backward_ref, gae_ref


def of_both(name: str, reference: object):
    """Parametrises a test over the kernel and the reference of an op."""

    def native(*arguments: object) -> object:
        return getattr(torch.ops.megarl, name)(*arguments)

    built = "cpu" in _native.native_devices(name)
    skip = pytest.mark.skipif(not built, reason="the compiled operators are not built")
    return pytest.mark.parametrize("op", [pytest.param(native, marks=skip), reference])


ROW, MASK, BOUNDS = torch.ones(4), torch.ones(4).bool(), torch.tensor([0, 2, 4])


@of_both("gae", gae_ref)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": torch.ones(2, 2)}, "rewards must have 1 dimension.s., got 2"),
        ({"values": torch.ones(5)}, "values must have 4 tokens like the others, got 5"),
        ({"mask": MASK[:3]}, "mask must have 4 tokens like the others, got 3"),
        ({"bootstrap": torch.ones(3)}, "bootstrap must have 2 entries, one a sequence, got 3"),
        ({"rewards": ROW.half()}, "rewards must be float32 or float64, got (Half|torch.float16)"),
        ({"values": ROW.long()}, "values must be float32 or float64, got (Long|torch.int64)"),
        ({"mask": ROW}, "mask must be bool, got (Float|torch.float32)"),
        ({"bootstrap": torch.ones(2).half()}, "bootstrap must be float32 or float64"),
        ({"cu_seqlens": ROW[:3]}, "must be int32 or int64, got (Float|torch.float32)"),
        ({"cu_seqlens": torch.tensor([1, 2, 4])}, "must start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, "must end at the 4 tokens, got 5"),
        ({"cu_seqlens": torch.tensor([0, 5, 4])}, "must not decrease, got 5 then 4 at entries 1"),
        ({"cu_seqlens": torch.zeros(0).int()}, "at least 1 entry, got 0"),
        ({"gamma": math.nan}, "gamma must be finite, got nan"),
        ({"gamma": math.inf}, "gamma must be finite, got inf"),
        ({"lam": -math.inf}, "lam must be finite, got -inf"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(op, changed, message):
    good = {"rewards": ROW, "values": ROW, "mask": MASK, "cu_seqlens": BOUNDS}
    good |= {"bootstrap": torch.ones(2), "gamma": 1.0, "lam": 1.0, "credit_previous": True}
    with pytest.raises(RuntimeError, match=message) as error:
        op(*(good | changed).values())
    assert "gae: " in str(error.value)


@of_both("discounted_returns", discounted_returns_ref)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROW.half(), MASK, BOUNDS, 1.0, True), "rewards must be float32 or float64"),
        ((ROW, MASK[:2], BOUNDS, 1.0, True), "mask must have 4 tokens like the others, got 2"),
        ((ROW, MASK, BOUNDS[:2], 1.0, True), "must end at the 4 tokens, got 2"),
        ((ROW, MASK, BOUNDS, math.nan, True), "gamma must be finite, got nan"),
    ],
)
def test_bad_arguments_of_returns_are_refused(op, arguments, message):
    with pytest.raises(RuntimeError, match=f"discounted_returns: .*{message}"):
        op(*arguments)


@of_both("gae_backward", gae_backward_ref)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROW, ROW.double(), MASK, BOUNDS, 1.0, 1.0, True), "grad_advantages must be float64"),
        ((ROW.double(), ROW[:2].double(), MASK, BOUNDS, 1.0, 1.0, True), "must have 4 tokens"),
        ((ROW.double(), ROW.double(), MASK, BOUNDS[1:], 1.0, 1.0, True), "must start at 0, got 2"),
    ],
)
def test_bad_arguments_of_the_adjoint_are_refused(op, arguments, message):
    with pytest.raises(RuntimeError, match=f"gae_backward: .*{message}"):
        op(*arguments)
