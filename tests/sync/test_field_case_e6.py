"""Buckets of every size keep together what a server's loader makes one of, in every family."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.served import ServedForm
from megarl.sync.packing import Packer
from megarl.sync.stream import pieces, unflatten
from tests.helpers.families import MODELS, save_model
from tests.models.test_served import form_of, wide_form

MAX_BYTES = [1, 700, 2**15 + 3, 2**26]
PLAIN = [pytest.param(name, False, id=name) for name in MODELS]
CODES = [
    pytest.param(name, True, id=f"{name} in FP8")
    for name, (family, _) in MODELS.items()
    if family != "gpt_oss"
]


def sent(
    form: ServedForm, tensors: dict[str, torch.Tensor], max_bytes: int
) -> Iterable[dict[str, torch.Tensor]]:
    """Buckets, as they are read at the other end."""
    packer = Packer(max_bytes, torch.device("cpu"))
    for bucket in packer.pack(pieces(form.groups(tensors.items()))):
        yield {name: t.clone() for name, t in unflatten(bucket.flat, bucket.specs)}


def partners(names: Iterable[str]) -> list[set[str]]:
    """What SGLang's loaders compute from in one call: codes with their scales, and the two
    projections of latent attention that it fuses, with theirs.
    """
    known = set(names)
    found = [{n, f"{n}_scale_inv"} for n in known if f"{n}_scale_inv" in known]
    for name in known:
        if name.endswith("q_a_proj.weight"):
            other = name.replace("q_a_proj", "kv_a_proj_with_mqa")
            found.append({n for n in (*_scaled(name), *_scaled(other)) if n in known})
    return found


def _scaled(name: str) -> tuple[str, str]:
    return name, f"{name}_scale_inv"


@pytest.mark.parametrize(("name", "in_codes"), [*PLAIN, *CODES])
def test_e6_every_name_once_and_partners_in_one_call(
    tmp_path: Path, name: str, in_codes: bool
) -> None:
    if in_codes:
        tensors, form = wide_form(name, tmp_path)
    else:
        source = save_model(name, tmp_path / "model")
        tensors, form = load_file(source / "model.safetensors"), form_of(source)
    announced = {spec.name for spec in form.specs}
    assert bool(in_codes) == any(n.endswith("_scale_inv") for n in announced)
    whole: dict[str, torch.Tensor] = {}
    for max_bytes in reversed(MAX_BYTES):
        buckets = list(sent(form, tensors, max_bytes))
        names = [name for bucket in buckets for name in bucket]
        assert len(names) == len(announced) and set(names) == announced
        for pair in partners(announced):
            assert sum(bool(pair & bucket.keys()) for bucket in buckets) == 1, pair
        arrived = {n: t for bucket in buckets for n, t in bucket.items()}
        whole = whole or arrived  # in one bucket first
        assert all(torch.equal(_bits(arrived[n]), _bits(whole[n])) for n in announced)
        for bucket in buckets:  # only what is larger by itself travels alone
            size = sum(t.nbytes for t in bucket.values())
            assert size <= max_bytes or len(bucket) <= 4


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
