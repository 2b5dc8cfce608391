"""The demo's tools, run as a user runs them."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.prompts import load_demonstrations, load_prompts
from megarl.data.rewards import load_reward
from megarl.data.tokenizer import load_tokenizer
from megarl.models.hf_io import check_complete, open_checkpoint
from megarl.models.spec import read_spec

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=120)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    run("make_demo_data.py", out, "--seed", 1)
    return out


def test_held_out_problems_are_in_no_other_file(demo: Path) -> None:
    """A problem is its expression: the same one under another id would be a leak."""

    def expressions(name: str) -> list[str]:
        return [re.sub(r"\s", "", row["prompt"]) for row in rows(demo / name)]

    heldout, prompts = expressions("heldout.jsonl"), expressions("prompts.jsonl")
    assert len(set(heldout)) == len(heldout) == 256
    assert len(set(prompts)) == len(prompts) > 3700
    assert set(heldout).isdisjoint(prompts)
    assert set(expressions("warmup.jsonl")) == set(prompts)


def test_answers_are_right_and_demonstrations_are_of_two_habits(demo: Path) -> None:
    """Checked by doing the sums here."""
    answers: dict[str, int] = {}
    for row in rows(demo / "prompts.jsonl") + rows(demo / "heldout.jsonl"):
        a, b, c = map(int, re.findall(r"[+-]?\d+", row["prompt"].replace(" ", "")))
        answers[row["prompt"]] = a + b + c
        assert int(row["answer"]) == a + b + c
    habits: Counter[str] = Counter()
    for row in rows(demo / "warmup.jsonl"):
        a, b, c = map(int, re.findall(r"[+-]?\d+", row["prompt"].replace(" ", "")))
        working, _, answer = row["response"].partition("</think>")
        if working:
            habits["careful"] += 1
            assert working == f"{a + b}{c:+d}"
            assert int(answer) == a + b + c
        else:
            habits["careless"] += 1
            assert int(answer) == abs(a) + abs(b) + abs(c)
    assert habits["careless"] / habits.total() == pytest.approx(0.6, abs=0.02)


def test_megarl_reads_the_files(demo: Path, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    prompts = load_prompts(demo / "heldout.jsonl", tokenizer, 7)
    assert {len(p.token_ids) for p in prompts} == {7}
    assert load_demonstrations(demo / "warmup.jsonl", tokenizer, 17)
    for name in ("exact_match", "reasoning_gym:chain_sum"):
        reward = load_reward(name)
        for prompt in prompts[:20]:
            assert reward(f"1+1</think>{prompt.payload['answer']}", prompt.payload, True) == 1.0
            assert reward(f"1+1</think>{prompt.payload['answer']}0", prompt.payload, True) == 0.0


def test_the_same_seed_makes_the_same_files(demo: Path, tmp_path: Path) -> None:
    run("make_demo_data.py", tmp_path / "again", "--seed", 1)
    run("make_demo_data.py", tmp_path / "other", "--seed", 2)
    for name in ("warmup.jsonl", "prompts.jsonl", "heldout.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (demo / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (demo / name).read_bytes()


def test_tiny_models_are_complete_and_follow_their_seed(tmp_path: Path, tiny_model: Path) -> None:
    spec = read_spec(tiny_model)
    assert (spec.layers, spec.experts, spec.topk, spec.num_moe_layers) == (4, 8, 2, 4)
    assert spec.eos_ids == (1,)
    check_complete(open_checkpoint(tiny_model), spec)
    run("make_tiny_model.py", tmp_path / "a", "--experts", 0, "--tie", "--dtype", "bfloat16")
    run("make_tiny_model.py", tmp_path / "b", "--experts", 0, "--tie", "--seed", 1)
    assert (read_spec(tmp_path / "a").family, read_spec(tmp_path / "a").dtype) == (
        "qwen3",
        "bfloat16",
    )
    a, b = (open_checkpoint(tmp_path / name) for name in "ab")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(a.get(name).float(), b.get(name))
    refused = run("make_tiny_model.py", tmp_path / "a", check=False)
    assert refused.returncode == 2
    assert "already holds something" in refused.stderr


def test_evaluation_agrees_with_transformers_generate(
    demo: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Greedy decoding one problem at a time, without padding, by transformers' own loop."""
    heldout = tmp_path / "heldout.jsonl"
    problems = rows(demo / "heldout.jsonl")[:12]
    for i in range(0, 12, 2):  # prompts of different lengths: padding matters
        problems[i]["prompt"] = problems[i]["prompt"].removesuffix("= <think>")
    heldout.write_text("\n".join(map(json.dumps, problems)))
    result = tmp_path / "result.json"
    run("eval_hf.py", tiny_model, heldout, "--json", result, "--batch", 5)
    responses = [r["response"] for r in json.loads(result.read_text())["responses"]]
    assert responses == generated_by_transformers(tiny_model, heldout, tmp_path)


GENERATE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, heldout, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
texts = []
for line in open(heldout):
    ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"]
    full = model.generate(ids, do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids))
    texts.append(tokenizer.decode(full[0, ids.shape[1]:]).removesuffix("<eos>"))
json.dump(texts, open(out, "w"))
"""


def generated_by_transformers(folder: Path, heldout: Path, tmp_path: Path) -> list[str]:
    """In a process of its own: the trainer's CPU support changes torch for the whole process."""
    out = tmp_path / "generated.json"
    command = [sys.executable, "-c", GENERATE, str(folder), str(heldout), str(out)]
    subprocess.run(command, check=True, timeout=120)
    texts: list[str] = json.loads(out.read_text())
    return texts


def test_forced_thinking_forbids_the_mark_only_at_the_start(
    demo: Path, tiny_model: Path, tmp_path: Path
) -> None:
    plain, forced = tmp_path / "plain.json", tmp_path / "forced.json"
    run("eval_hf.py", tiny_model, demo / "heldout.jsonl", "--json", plain)
    run("eval_hf.py", tiny_model, demo / "heldout.jsonl", "--json", forced, "--forced-think")
    results = [json.loads(path.read_text()) for path in (plain, forced)]
    assert results[0]["thought_share"] < 1.0
    assert results[1]["thought_share"] == 1.0
    for before, after in zip(results[0]["responses"], results[1]["responses"], strict=True):
        if before["thought"]:
            assert before == after
