"""The plugin's own logic, without SGLang: what is hashed, and when a tensor counts as received."""

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megarl.ops import digest, digest_partial
from tests.ops.plain_digest import DTYPES, plain, raw, some

PLUGIN = Path(__file__).parents[2] / "megarl" / "sync" / "sglang_plugin" / "megarl_sglang_plugin.py"


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    """Loaded from its file, as it is not part of megarl's own environment."""
    spec = importlib.util.spec_from_file_location("megarl_sglang_plugin", PLUGIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(torch.nn.Module):
    """Takes the first `taken` tensors it is offered, and changes each in place."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self.taken = taken

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        names = []
        for name, tensor in weights:
            names.append(name)
            tensor.zero_()
            if len(names) == self.taken:
                break
        return names


@pytest.fixture(params=["megarl's operator", "plain torch"], autouse=True)
def with_and_without_megarl(request, plugin, monkeypatch) -> None:
    if request.param == "plain torch":
        monkeypatch.setattr(plugin, "_digest_partial", None)
    else:
        assert plugin._digest_partial is digest_partial


def test_the_digest_is_that_of_its_definition(plugin):
    tensor = torch.tensor([1.0, 2.0])
    text = f"float32|[2]|{plain(raw(tensor), range(8)):016x}"
    assert plugin.tensor_digest(tensor) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (64, 40), (3, 70_001)])
def test_server_and_trainer_agree_on_the_digest(plugin, dtype, shape):
    tensor = some(shape, dtype)
    assert plugin.tensor_digest(tensor) == digest(tensor)


def test_layout_in_memory_does_not_matter_but_shape_and_dtype_do(plugin):
    tensor = torch.arange(6.0).reshape(2, 3)
    digest = plugin.tensor_digest(tensor)
    assert plugin.tensor_digest(tensor.T.contiguous().T) == digest
    assert plugin.tensor_digest(tensor.reshape(3, 2)) != digest
    assert plugin.tensor_digest(tensor.view(torch.int32)) != digest


def test_a_tensor_counts_once_the_model_has_taken_it_and_as_it_came(plugin):
    weights = {f"w{i}": torch.full((3,), float(i)) for i in range(100)}
    expected = {name: digest(tensor) for name, tensor in weights.items()}
    model, record = Model(taken=70), {}
    plugin._tap(model, record)
    names = model.load_weights(weights.items())
    assert names == list(weights)[:70]
    assert record == {name: expected[name] for name in names}

    plugin._untap(model)
    model.load_weights([("later", torch.ones(1))])
    assert "later" not in record


def test_an_error_while_loading_is_passed_on_and_what_follows_does_not_count(plugin):
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(1)
        raise ValueError("torn stream")

    model, record = Model(taken=5), {}
    plugin._tap(model, record)
    with pytest.raises(ValueError, match="torn stream"):
        model.load_weights(weights())
    assert record == {}
