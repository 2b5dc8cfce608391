"""The embedded engine in this process: both shapes, its random numbers, and what breaks in it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import ConfigError, DataError, ServerError
from megarl.rollout.embedded import Engine, Unusable
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.embedded_sampling import Truncation, sample, uniforms
from megarl.rollout.embedded_schedule import Schedule
from megarl.rollout.wire import Generated, GenerateRequest, Limits, parse_generate
from megarl.types import TensorSpec
from tests.rollout.conftest import CONTEXT, Reference, write_tiny_model

PROMPTS = [[5], [3, 9, 14, 2], [2 + i % 20 for i in range(32)], [2 + i % 17 for i in range(45)]]


class NoWeights:
    """A receiver to which nothing comes: what arrives is broken, what was announced is missing."""

    digest_seconds = 0.0

    def join_group(self, **_: Any) -> None: ...

    def leave_group(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def receive(self, specs: Sequence[TensorSpec], *, group: str, flattened: bool) -> Any:
        raise ServerError("the sender is gone")

    def end(self) -> None:
        raise ServerError("nothing was received")

    def digests(self) -> dict[str, str]:
        return {}


def slot_model(folder: Path, **changes: Any) -> SlotModel:
    options: dict[str, Any] = {
        "num_slots": 6,
        "context_length": CONTEXT,
        "dtype": "fp32",
        "fixed_shape": True,
    }
    return SlotModel(folder, **(options | changes))


@pytest.fixture(params=["fixed", "flexible"])
def engine(request: pytest.FixtureRequest, model_a: Path) -> Iterator[Engine]:
    made = Engine(slot_model(model_a, fixed_shape=request.param == "fixed"), NoWeights())
    made.start()
    yield made
    made.stop()


def requests_for(
    engine: Engine, prompts: Sequence[list[int]], **sampling: Any
) -> list[GenerateRequest]:
    body = {
        "input_ids": list(prompts),
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True} | sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": True,
    }
    return parse_generate(body, engine.limits)[0]


def ask(engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> list[Generated]:
    return engine.submit(requests_for(engine, prompts, **sampling)).result(60)


def test_both_shapes_compute_what_transformers_does(engine: Engine, reference_a: Reference) -> None:
    """More sequences than slots, with prompts short and long enough to go through in one piece."""
    prompts = [*PROMPTS, *PROMPTS[::-1], *PROMPTS]
    for prompt, result in zip(prompts, ask(engine, prompts), strict=True):
        tokens = prompt + result.token_ids
        expected = reference_a.logprobs(tokens)
        got = torch.tensor([*(result.input_logprobs or []), *result.logprobs])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        assert result.routing is not None
        np.testing.assert_array_equal(result.routing, reference_a.routing(tokens)[:-1])


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(
    model_a: Path, reference_a: Reference
) -> None:
    """By the median: of a few tokens, rounding sends one to another expert, with one and not with
    the other. In which depends on what was sampled.
    """
    from transformers import AutoModelForCausalLM

    engine = Engine(slot_model(model_a, dtype="bf16"), NoWeights())
    engine.start()
    results = ask(engine, PROMPTS[1:3])
    engine.stop()
    plain = AutoModelForCausalLM.from_pretrained(model_a, dtype=torch.bfloat16).eval()
    ours, theirs = [], []
    for prompt, result in zip(PROMPTS[1:3], results, strict=True):
        tokens = prompt + result.token_ids
        exact = reference_a.logprobs(tokens)
        with torch.no_grad():
            logits = plain(torch.tensor([tokens])).logits[0, :-1].float()
        rounded = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        got = torch.tensor([*(result.input_logprobs or []), *result.logprobs])
        ours.append((got - exact).abs())
        theirs.append((rounded - exact).abs())
    assert torch.cat(ours).median() < 3 * torch.cat(theirs).median()


def test_a_step_that_fails_fails_its_requests_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = engine.model.module.lm_head.weight
    kept = weight.clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ServerError, match="not finite"):
        ask(engine, PROMPTS[:2])
    with torch.no_grad():
        weight.copy_(kept)
    assert len(ask(engine, PROMPTS[:2])[0].token_ids) == 12


def test_what_fails_one_sequence_of_a_call_ends_the_others_and_no_other_call(
    engine: Engine,
) -> None:
    """More than there are slots: some of them wait, some run, one has no finite logits."""
    broken, new = 23, CONTEXT - 2
    weight = engine.model.module.model.embed_tokens.weight
    kept = weight[broken].clone()
    other = engine.submit(requests_for(engine, [[4]], temperature=0))
    with torch.no_grad():
        weight[broken] = float("nan")
    prompts = [[5], [broken], *[[6]] * 8]
    requests = requests_for(engine, prompts, max_new_tokens=new, temperature=0)
    with pytest.raises(ServerError, match="not finite"):
        engine.submit(requests).result(60)
    assert engine.ping().result(60) is None
    assert engine.state()["waiting"] == 0 and engine.state()["running"] <= 1
    assert len(other.result(60)[0].token_ids) == 12
    with torch.no_grad():
        weight[broken] = kept
    assert len(engine.submit(requests).result(60)) == 10  # under the same ids


def test_nan_in_a_cache_does_not_reach_the_next_sequence(engine: Engine) -> None:
    before = [r.logprobs for r in ask(engine, PROMPTS, sampling_seed=4)]
    norm = engine.model.module.model.layers[0].input_layernorm.weight
    kept = norm.clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
    with pytest.raises(ServerError):
        ask(engine, [[3] * 40] * 6)
    with torch.no_grad():
        norm.copy_(kept)
    after = [r.logprobs for r in ask(engine, PROMPTS, sampling_seed=4)]
    if engine.model.fixed_shape:
        assert after == before
    else:  # here rows' bits depend on their neighbours
        torch.testing.assert_close(torch.tensor(after), torch.tensor(before), atol=1e-5, rtol=0)


@pytest.mark.parametrize("at", ["receive", "later", "end"])
def test_a_failed_update_ends_every_request_and_takes_no_more(engine: Engine, at: str) -> None:
    engine.pause("retract").result(10)
    held = engine.submit(requests_for(engine, PROMPTS))
    engine.begin_update().result(10)
    if at == "receive":
        broken = engine.update(lambda to: to.receive([], group="g", flattened=True))
    elif at == "later":
        coming = Future[None]()
        broken = engine.update(lambda to: coming)
        engine.ping().result(10)  # it does not wait for what comes
        coming.set_exception(ServerError("the sender is gone"))
    else:
        broken = engine.end_update()
    with pytest.raises(ServerError):
        broken.result(10)
    for future in (held, engine.submit(requests_for(engine, PROMPTS))):
        with pytest.raises(Unusable, match=r"the sender is gone|nothing was received"):
            future.result(10)
    engine.load_folder(engine.model.folder, "9", abort=False).result(60)
    engine.resume().result(10)
    assert ask(engine, PROMPTS[:1])[0].versions == [("9", 0)]


def test_stopping_fails_what_waits(model_a: Path) -> None:
    engine = Engine(slot_model(model_a), NoWeights())
    engine.start()
    engine.pause("in_place").result(10)
    waiting = engine.submit(requests_for(engine, PROMPTS))
    engine.stop()
    with pytest.raises(ServerError, match="shutting down"):
        waiting.result(10)


def test_models_that_cannot_be_served_are_refused(model_a: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        slot_model(tmp_path)
    with pytest.raises(ConfigError, match="dtype: found fp16"):
        slot_model(model_a, dtype="fp16")
    with pytest.raises(ConfigError, match=r"context_length: found 4096; accepted: up to 128"):
        slot_model(model_a, context_length=4096)
    (tmp_path / "config.json").write_text((model_a / "config.json").read_text())
    with pytest.raises(DataError, match="cannot be loaded"):
        slot_model(tmp_path)


def test_code_that_lies_in_a_model_folder_is_never_run(model_a: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = (model_a / "config.json").read_text().replace("qwen3_moe", "nothing_known")
    config = config.replace("{", '{"auto_map": {"AutoModelForCausalLM": "evil.Evil"},', 1)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(DataError):
        slot_model(tmp_path)
    assert not marker.exists()


def test_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    """Chi-square over 64 bins (63 degrees of freedom: below 117 in all but 1 of 20,000), along
    seeds, along positions, and for the pairs of neighbours."""
    n = 2**14
    along = np.arange(n, dtype=np.uint64)
    for draws in (uniforms(along, np.full_like(along, 7)), uniforms(np.full_like(along, 7), along)):
        assert draws.min() >= 0 and draws.max() < 1
        cells = np.floor(draws * 64).astype(int)
        pairs = np.floor(draws[:-1] * 8).astype(int) * 8 + np.floor(draws[1:] * 8).astype(int)
        for counts in (np.bincount(cells, minlength=64), np.bincount(pairs, minlength=64)):
            expected = counts.sum() / 64
            assert ((counts - expected) ** 2 / expected).sum() < 117


def test_sampling_inverts_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -40.0, 2.0]]).log_softmax(-1)
    bounds = logits.double().exp().cumsum(-1)[0]
    for draw, token in ((0.0, 0), (float(bounds[0]) + 1e-9, 1), (float(bounds[1]) + 1e-9, 3)):
        got, logprob = sample(logits, torch.ones(1), torch.tensor([draw], dtype=torch.float64))
        assert got.item() == token and logprob.item() == logits[0, token].item()
    highest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    certain = torch.tensor([[5.0, -1e9, -1e9]])
    assert sample(certain, torch.ones(1), highest)[0].item() == 0  # never a token of probability 0
    greedy, logprob = sample(logits, torch.zeros(1), highest)
    assert greedy.item() == 3 and logprob.item() == logits[0, 3].item()


# Out of order; likeliest first they are tokens 2, 4, 0, 1, 3.
PROBABILITIES = [0.16, 0.10, 0.40, 0.04, 0.30]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, 0.0, {2, 4}),
        (1, 1.0, 0.0, {2}),
        (5, 0.69, 0.0, {2, 4}),  # of what is likelier than token 0 there is 0.70
        (5, 0.71, 0.0, {2, 4, 0}),
        (5, 1e-9, 0.0, {2}),
        (5, 1.0, 0.30, {2, 4, 0}),  # 0.12 and more
        (5, 1.0, 0.26, {2, 4, 0}),
        (5, 1.0, 0.24, {2, 4, 0, 1}),
        (5, 1.0, 1.0, {2}),
        (3, 0.60, 0.26, {2, 4}),  # all three: each of the whole distribution
        (2, 0.71, 0.0, {2, 4}),
        (5, 1.0, 0.0, {0, 1, 2, 3, 4}),
    ],
)
def test_truncated_sampling_draws_from_what_is_kept_and_reports_the_whole(
    top_k: int, top_p: float, min_p: float, kept: set[int]
) -> None:
    """Draws at even distances give every kept token its renormalised share, to one draw."""
    n = 1000
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    logits = torch.tensor(PROBABILITIES).log().expand(n, -1)
    limits = [torch.full((n,), value) for value in (top_k, top_p, min_p)]
    truncation = Truncation(limits[0], limits[1].double(), limits[2].double())
    tokens, logprobs = sample(logits, torch.ones(n), draws, truncation)
    mass = sum(PROBABILITIES[token] for token in kept)
    for token, probability in enumerate(PROBABILITIES):
        expected = n * probability / mass if token in kept else 0
        assert abs(int((tokens == token).sum()) - expected) <= (1 if token in kept else 0)
    torch.testing.assert_close(logprobs, torch.tensor(PROBABILITIES).log()[tokens])


def test_temperature_comes_before_truncation_and_greedy_ignores_it() -> None:
    """At temperature 1/2 probabilities are squared: 0.5, 0.3, 0.2 become 25, 9, 4 of 38."""
    logits = torch.tensor([0.3, 0.5, 0.2]).log().expand(3, -1)
    one = torch.full((3,), 24.5 / 38, dtype=torch.float64)  # less than the likeliest one alone
    truncation = Truncation(torch.full((3,), 3), one, torch.zeros(3, dtype=torch.float64))
    lowest = torch.zeros(3, dtype=torch.float64)  # draws the kept token of the lowest id
    temperatures = torch.tensor([0.5, 1.0, 0.0])
    tokens, logprobs = sample(logits, temperatures, lowest, truncation)
    assert tokens.tolist() == [1, 0, 1]
    expected = torch.tensor([25 / 38, 0.3, 0.5]).log()
    torch.testing.assert_close(logprobs, expected)


def test_equally_likely_tokens_are_kept_by_id_and_neighbours_keep_their_bits() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    logits[1] = 0
    draws = torch.tensor([0.1, 0.999, 0.5, 0.9], dtype=torch.float64)
    plain = sample(logits, torch.ones(4), draws)
    ks = torch.tensor([50, 7, 50, 50])
    ones = torch.ones(4, dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(4), draws, Truncation(ks, ones, ones * 0))
    assert tokens[1] == 6
    others = torch.tensor([0, 2, 3])
    assert torch.equal(tokens[others], plain[0][others])
    assert torch.equal(logprobs[others], plain[1][others])


def test_a_truncated_request_among_others_samples_from_its_nucleus_alone(
    engine: Engine, reference_a: Reference
) -> None:
    """A batch with and without: the former stay in their nucleus, the latter leave it."""
    prompt, narrow = PROMPTS[1], {"top_p": 0.3, "top_k": 4, "min_p": 0.05}
    plain = ask(engine, [prompt] * 6, sampling_seed=5)
    mixed = requests_for(engine, [prompt] * 3, **narrow) + requests_for(engine, [prompt] * 3)
    left = 0
    for place, result in enumerate([*engine.submit(mixed).result(60), *plain]):
        tokens = list(prompt)
        for token in result.token_ids:
            likely = reference_a.next_probabilities(tokens)
            ordered, ids = likely.sort(descending=True)
            kept = (ordered.cumsum(0) - ordered <= 0.3) & (ordered >= 0.05 * ordered[0])
            inside = token in ids[kept][:4].tolist()
            assert inside or place >= 3
            left += not inside
            tokens.append(token)
    assert left > 10


def schedule_with(prompts: list[list[int]], num_slots: int) -> Schedule:
    schedule = Schedule(num_slots)
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 2}}
    schedule.add(parse_generate(body, Limits(24, 64, True))[0])
    return schedule


def test_a_schedule_serves_in_order_and_never_shares_a_slot() -> None:
    schedule = schedule_with([[1, 2, i] for i in range(5)], 3)
    assert schedule.admit() == [0, 1, 2] and len(schedule.waiting) == 2
    rows = schedule.rows(4)
    assert [(s.slot, position) for s, position in rows] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    for sequence, position in rows:
        sequence.done = position + 1
    first = schedule.running[0]
    first.accept(9, -1.0, "0")
    assert [(s.slot, p) for s, p in schedule.rows(4)] == [(0, 3), (1, 1), (1, 2), (2, 0)]
    schedule.finish([first])
    assert schedule.admit() == [0]
    assert sorted(s.slot for s in schedule.running if s.slot is not None) == [0, 1, 2]
    order = [s.request.rid for s in (*schedule.running, *schedule.waiting)]
    schedule.retract_all()
    assert [s.request.rid for s in schedule.waiting] == order
    assert all(s.done == 0 and s.slot is None for s in schedule.waiting)
    assert schedule.admit() == [0, 1, 2]


def test_equal_prompts_are_fed_once_and_survive_the_loss_of_their_leader() -> None:
    schedule = schedule_with([[1, 2, 3]] * 3 + [[4, 5]], 4)
    schedule.admit()
    a, b, c, other = schedule.running
    rows = schedule.rows(4)
    assert rows == [(a, 0), (a, 1), (a, 2), (other, 0)]
    a.done = 2
    schedule.take([a.request.rid])
    assert b.members == [b, c] and c.leader is b and (b.done, c.done) == (0, 0)
    assert schedule.rows(9) == [(b, 0), (b, 1), (b, 2), (other, 0), (other, 1)]
    schedule.take([c.request.rid])
    assert b.members == [b]
    schedule.retract_all()
    schedule.admit()
    assert b.leader is None and b.members == [b]


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 36), ("fp32", 38), ("bf16", 40)])
def test_experts_of_any_width_are_computed(tmp_path: Path, dtype: str, width: int) -> None:
    """torch's grouped product wants rows of whole 16 bytes: 36 in bf16 and 38 in fp32 are none."""
    folder = write_tiny_model(tmp_path / "model", seed=0, expert_width=width)
    model = slot_model(folder, dtype=dtype, fixed_shape=False)
    tokens = PROMPTS[3]
    logits, _ = model.forward_chunk(np.array(tokens), 0, 0, all_logits=True)
    every = logits[:-1].float().log_softmax(-1)
    found = every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    expected = Reference(folder).logprobs(tokens)  # in fp32, by transformers
    if dtype == "fp32":
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    else:  # rounding, and experts that change places by it
        assert float((found - expected).abs().mean()) < 0.06
