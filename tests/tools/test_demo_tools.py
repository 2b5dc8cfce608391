"""The demo's tools, run as a user runs them."""

import json
import os
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
from megarl.models.hf_complete import check_complete
from megarl.models.hf_io import open_checkpoint
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
        terms = re.findall(r"[+-]?\d+", row["prompt"].replace(" ", ""))
        a, b, c = map(int, terms)
        working, _, answer = row["response"].partition("</think>")
        if working:
            habits["careful"] += 1
            assert working == f"{a + b}{terms[2]}"
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
            right = int(prompt.payload["answer"])
            assert reward(f"1+1</think>{right}", prompt.payload, True) == 1.0
            assert reward(f"{right}</think>{right + 1}", prompt.payload, True) == 0.0


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
    options = ("--experts", 0, "--tie", "--dtype", "bfloat16")
    run("make_tiny_model.py", tmp_path / "a", *options)
    run("make_tiny_model.py", tmp_path / "b", *options, "--seed", 1)
    spec = read_spec(tmp_path / "a")
    assert (spec.family, spec.dtype, spec.tie_embeddings) == ("qwen3", "bfloat16", True)
    a, b = (open_checkpoint(tmp_path / name) for name in "ab")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(a.get(name), b.get(name))
    refused = run("make_tiny_model.py", tmp_path / "a", check=False)
    assert refused.returncode == 2
    assert "already holds something" in refused.stderr


COMPARE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import eval_hf
folder, heldout = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in open(heldout)]
plain, banned = [], []
for ids in prompts:  # one at a time, without padding, by transformers' own loop
    row = torch.tensor([ids])
    both = {"input_ids": row, "attention_mask": torch.ones_like(row), "max_new_tokens": 24}
    full = model.generate(**both, do_sample=False)
    plain.append(full[0, len(ids):].tolist())
    first = plain[-1][0]
    full = model.generate(**both, do_sample=False, begin_suppress_tokens=[first])
    banned.append(full[0, len(ids):].tolist())
options = {"limit": 24, "stops": eval_hf.stop_tokens(model, tokenizer)}
ours = eval_hf.generate(model, prompts, banned_first=[], **options)
assert ours == plain, (ours, plain)
for ids, row, other in zip(prompts, plain, banned):
    (forced,) = eval_hf.generate(model, [ids], banned_first=row[:1], **options)
    assert forced == other, (forced, other)
print(len(set(map(len, prompts))), len(set(map(len, plain))))
"""


def test_decoding_agrees_with_transformers_generate(
    demo: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Also where padding matters, and with the first token forbidden.

    In a process of its own: the trainer's CPU support changes torch for the whole process.
    """
    problems = rows(demo / "heldout.jsonl")[:12]
    for problem in problems[::2]:
        problem["prompt"] = problem["prompt"].removesuffix("= <think>")
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("\n".join(map(json.dumps, problems)))
    command = [sys.executable, "-c", COMPARE, str(tiny_model), str(heldout)]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    prompt_lengths, _ = map(int, done.stdout.split())
    assert prompt_lengths == 2


def test_evaluation_counts_by_the_answer_rule(demo: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Every verdict in the report is checked here against its own response."""
    result = tmp_path / "result.json"
    said = run("eval_hf.py", tiny_model, demo / "heldout.jsonl", "--json", result, "--forced-think")
    report = json.loads(result.read_text())
    answers = {row["id"]: row["answer"] for row in rows(demo / "heldout.jsonl")}
    assert [r["id"] for r in report["responses"]] == list(answers)
    assert (report["total"], report["thought_share"]) == (256, 1.0)
    for verdict in report["responses"]:
        right = verdict["response"].split("</think>")[-1].strip() == answers[verdict["id"]]
        assert not verdict["correct"] or right
    assert report["accuracy"] == sum(r["correct"] for r in report["responses"]) / 256
    assert f"accuracy {report['accuracy']:.3f}" in said.stdout
