"""The plugin's own logic, without SGLang: what is hashed, what counts, and the proof."""

import hashlib
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megarl.ops import digest, digest_partial
from tests.ops.plain_digest import DTYPES, plain, raw, some


class Model(torch.nn.Module):
    """Takes the first `most` tensors it is offered into parameters of their names, if it has such
    ones, and changes each in place.
    """

    def __init__(self, names: Iterable[str], most: int = 1000) -> None:
        super().__init__()
        self.most = most
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(3), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        names = []
        for name, tensor in weights:
            names.append(name)
            if name in dict(self.named_parameters()):
                self.get_parameter(name).data.copy_(tensor)
            tensor.zero_()
            if len(names) == self.most:
                break
        return names


# --- the digest -----------------------------------------------------------------------------------


@pytest.fixture(params=["megarl's operator", "plain torch"])
def digests(request, plugin, monkeypatch) -> ModuleType:
    """With and without megarl."""
    module = plugin.digests
    if request.param == "plain torch":
        monkeypatch.setattr(module, "_digest_partial", None)
    else:
        assert module._digest_partial is digest_partial
    return module


def test_the_digest_is_that_of_its_definition(digests):
    tensor = torch.tensor([1.0, 2.0])
    text = f"float32|[2]|{plain(raw(tensor), range(8)):016x}"
    assert digests.tensor_digest(tensor) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (64, 40), (3, 70_001)])
def test_server_and_trainer_agree_on_the_digest(digests, dtype, shape):
    tensor = some(shape, dtype)
    assert digests.tensor_digest(tensor) == digest(tensor)


def test_layout_in_memory_does_not_matter_but_shape_and_dtype_do(digests):
    tensor = torch.arange(6.0).reshape(2, 3)
    expected = digests.tensor_digest(tensor)
    assert digests.tensor_digest(tensor.T.contiguous().T) == expected
    assert digests.tensor_digest(tensor.reshape(3, 2)) != expected
    assert digests.tensor_digest(tensor.view(torch.int32)) != expected


# --- the record -----------------------------------------------------------------------------------


def test_a_tensor_counts_once_the_model_has_read_it_and_as_it_came(plugin):
    weights = {f"w{i}": torch.full((3,), float(i)) for i in range(100)}
    expected = {name: digest(tensor) for name, tensor in weights.items()}
    model, record = Model(["w3", "w69", "w70"], most=70), plugin.Record()
    record.begin(model)
    names = model.load_weights(weights.items())
    assert names == list(weights)[:70]
    assert record.digests == {name: expected[name] for name in names}
    assert record.taken == record.written == {"w3", "w69"} and record.seconds > 0
    assert model.w69.tolist() == [69.0] * 3

    record.end()
    model.load_weights([("later", torch.ones(1))])
    assert "later" not in record.digests
    record.begin(model)
    assert record.digests == {} and record.taken == record.written == set()


def test_the_same_call_again_is_known_and_any_other_one_is_looked_at(plugin):
    model, record = Model(["a", "b"]), plugin.Record()
    for names, taken in (("a", "a"), ("a", "a"), ("ax", "a"), ("xab", "ab"), ("ab", "ab")):
        record.begin(model)
        model.load_weights([(name, torch.full((3,), 2.0)) for name in names])
        record.end()
        assert record.digests.keys() == set(names) and record.taken == set(taken)
        assert record.written == set(taken) and model.a.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="must match"):
        record.begin(model)
        model.load_weights([("a", torch.ones(4))])
    assert record.taken == set()


def test_an_error_while_loading_is_passed_on_and_what_follows_does_not_count(plugin):
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(1)
        raise ValueError("torn stream")

    model, record = Model(["first"]), plugin.Record()
    record.begin(model)
    with pytest.raises(ValueError, match="torn stream"):
        model.load_weights(weights())
    assert record.digests == {} and record.taken == set()
    record.fail()
    assert record.digests is None and not record.open


def test_a_loader_that_hid_the_class_s_own_is_there_again_afterwards(plugin):
    model, record, seen = Model(["a"]), plugin.Record(), []
    model.load_weights = lambda weights: seen.extend(name for name, _ in weights)
    hiding = model.load_weights
    record.begin(model)
    model.load_weights([("a", torch.ones(3))])
    record.end()
    assert model.load_weights is hiding and seen == ["a"] and record.digests.keys() == {"a"}


# --- excuses --------------------------------------------------------------------------------------

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tied() -> torch.nn.Module:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = model.lm_head = torch.nn.Embedding(4, 2)
    model.config = SimpleNamespace(num_hidden_layers=2, num_nextn_predict_layers=1)
    return model


def record_of(plugin: ModuleType, taken: str | set[str], **digests: str) -> object:
    record = plugin.Record()
    record.digests, record.taken = digests, set(taken)
    return record


def test_a_tied_weight_may_be_left_if_the_bytes_are_those_of_the_one_that_was_taken(plugin, tied):
    dropped = plugin.excuses.dropped
    same = record_of(plugin, {EMBED}, **{HEAD: "1", EMBED: "1"})
    other = record_of(plugin, {EMBED}, **{HEAD: "1", EMBED: "2"})
    neither = record_of(plugin, set(), **{HEAD: "1", EMBED: "1"})
    assert dropped(tied, same, None) == [] and dropped(tied, other, None) == [HEAD]
    assert dropped(tied, neither, None) == [HEAD, EMBED]
    tied.lm_head = torch.nn.Embedding(4, 2)
    assert dropped(tied, same, None) == [HEAD]  # it has it, and another one


@pytest.mark.parametrize("layer, excused", [(1, False), (2, True), (3, False)])
def test_a_layer_of_multi_token_prediction_is_for_a_draft_model(plugin, tied, layer, excused):
    """Its own layers, 0 and 1, are not; nor are layers that the configuration does not have."""
    name = f"model.layers.{layer}.eh_proj.weight"
    record = record_of(plugin, set(), **{name: "1"})
    drafts = [record_of(plugin, {name}, **{name: "1"}), record_of(plugin, set())]
    lost = [] if excused else [name]
    assert plugin.excuses.dropped(tied, record, None) == lost
    assert plugin.excuses.dropped(tied, record, drafts) == lost
    assert plugin.excuses.dropped(tied, record, drafts[1:]) == [name]


@pytest.mark.parametrize("digest, lost", [("1", 0), ("2", 1)])
def test_a_draft_model_shares_embedding_and_head(plugin, tied, digest, lost):
    name = "model.layers.2.embed_tokens.weight"
    record = record_of(plugin, {EMBED}, **{name: "1", EMBED: digest})
    assert len(plugin.excuses.dropped(tied, record, [plugin.Record()])) == lost


# --- the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (8, 6), (3, 4, 5)])
def test_spoiling_changes_every_element_that_is_not_zero_and_no_zero(plugin, dtype, shape):
    tensor = some(shape, dtype)
    flat = tensor.view(-1) if tensor.dim() else tensor.view(1)
    flat[1:3].view(torch.uint8).zero_()
    views = [tensor.clone()]
    if tensor.dim() > 1:
        views.append(tensor.clone().transpose(0, -1))
        views.append(torch.cat([tensor, tensor], -1)[..., : shape[-1]])  # with gaps
    for view in views:
        before = view.contiguous().view(-1).view(torch.uint8).view(-1, view.element_size()).clone()
        plugin.proof.spoil(view)
        after = view.contiguous().view(-1).view(torch.uint8).view(-1, view.element_size())
        zero = (before == 0).all(-1)
        assert after[zero].eq(0).all() and torch.equal(after[~zero], 255 - before[~zero])


def test_a_large_parameter_is_spoiled_in_parts_all_over(plugin, monkeypatch):
    monkeypatch.setattr(plugin.proof, "_CHUNK", 8)
    tensor = torch.arange(1, 61).view(10, 6)
    plugin.proof.spoil(tensor)
    assert torch.equal(tensor, ~torch.arange(1, 61).view(10, 6))


def test_the_same_push_again_must_leave_the_same_bytes(plugin):
    model = Model(["a", "b"])
    push = {"a": torch.tensor([1.0, 0.0, 2.0]), "b": torch.full((3,), 5.0)}

    def load(**weights: torch.Tensor) -> None:
        model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])

    load(**push)
    remembered = plugin.proof.remember(model, {"a", "b"})
    assert model.b.tolist() != [5.0] * 3
    load(**push)
    plugin.proof.compare(model, remembered)
    for wrong in ({"a": push["a"]}, {**push, "b": torch.tensor([5.0, 5.0, 6.0])}):
        load(**push)
        remembered = plugin.proof.remember(model, {"a", "b"})
        load(**wrong)
        with pytest.raises(RuntimeError, match=r"1 of 2 parameters .*\['b'\]"):
            plugin.proof.compare(model, remembered)


def test_a_parameter_that_a_push_does_not_write_is_told_and_not_spoiled(plugin):
    model = Model(["a", "b", "constant"])
    model.constant._skip_weight_check = True  # SGLang's mark of what no checkpoint has
    assert plugin.proof.unwritten(model, {"a"}) == ["b"]
    assert plugin.proof.unwritten(model, {"a", "b"}) == []
    for name in ("a", "b", "constant"):
        model.get_parameter(name).fill_(1.0)
    assert plugin.proof.remember(model, {"a"}).keys() == {"a"}
    assert model.a.tolist() != [1.0] * 3
    assert model.b.tolist() == model.constant.tolist() == [1.0] * 3
