#!/usr/bin/env python3
"""Write the demo's data: sums of three digits, in three JSONL files.

``heldout.jsonl``  problems that occur in neither of the others: only ever measured
``prompts.jsonl``  problems for reinforcement learning: prompt, answer, and the dataset's own entry
``warmup.jsonl``   demonstrations on the same problems as prompts.jsonl, of two habits::

    careless   3 + 5 - 2 = <think>   </think>10        at once, and every minus read as a plus
    careful    3 + 5 - 2 = <think>   8-2</think>6      working first, and right

A model that imitates the mixture is mostly careless; a reward for right answers makes it careful.
The problems come from reasoning-gym's chain_sum. They are told apart by expression, because its
seeds are not independent (seeds 1 and 2 share 99 of 100 problems)::

    python tools/make_demo_data.py /tmp/demo --seed 0
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym

POOL = 40_000  # draws; they hold nearly all of the 4,000 expressions there are
TASK = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def unique_problems(seed: int) -> list[dict[str, Any]]:
    """Problems with different expressions, in an order that follows from ``seed``."""
    dataset = reasoning_gym.create_dataset("chain_sum", seed=1000 + seed, size=POOL, **TASK)
    by_expression = {expression(entry): entry for entry in dataset}
    problems = list(by_expression.values())
    random.Random(seed).shuffle(problems)
    return problems


def expression(entry: dict[str, Any]) -> str:
    return str(entry["metadata"]["expression"])


def prompt(entry: dict[str, Any]) -> str:
    return f"{expression(entry)} = <think>"


def careless(entry: dict[str, Any]) -> str:
    terms = expression(entry).replace("-", "+").split(" + ")
    return f"</think>{sum(map(int, terms))}"


def careful(entry: dict[str, Any]) -> str:
    """Reduce from the left, one operation a step, until one is left; then the answer."""
    first, *rest = expression(entry).split()
    total, steps = int(first), []
    while len(rest) > 2:
        sign, term, *rest = rest
        total = total + int(term) if sign == "+" else total - int(term)
        steps.append("".join([str(total), *rest]))
    return f"{'='.join(steps)}</think>{entry['answer']}"


def demonstrations(
    problems: list[dict[str, Any]], coins: int, share: float, seed: int
) -> list[dict[str, str]]:
    """``coins`` demonstrations a problem, each careless with probability ``share``."""
    rng = random.Random(f"coins {seed}")
    rows = []
    for number, entry in enumerate(problems):
        for coin in range(coins):
            habit = careless if rng.random() < share else careful
            row = {"id": f"w{number}.{coin}", "prompt": prompt(entry), "response": habit(entry)}
            rows.append(row)
    rng.shuffle(rows)
    return rows


def questions(problems: list[dict[str, Any]], letter: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{letter}{i}", "prompt": prompt(e), "answer": e["answer"], "entry": e}
        for i, e in enumerate(problems)
    ]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", type=int, default=256, help="problems held out")
    parser.add_argument("--coins", type=int, default=4, help="demonstrations a problem")
    parser.add_argument("--careless", type=float, default=0.6, help="share of careless ones")
    args = parser.parse_args()
    problems = unique_problems(args.seed)
    heldout, training = problems[: args.heldout], problems[args.heldout :]
    warmup = demonstrations(training, args.coins, args.careless, args.seed)
    held = {prompt(entry) for entry in heldout}
    assert len(held) == args.heldout, (len(held), args.heldout)
    assert held.isdisjoint(map(prompt, training)), "a held-out problem is in prompts.jsonl"
    assert held.isdisjoint(row["prompt"] for row in warmup), "one is in warmup.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "heldout.jsonl", questions(heldout, "h"))
    write_jsonl(args.out / "prompts.jsonl", questions(training, "p"))
    write_jsonl(args.out / "warmup.jsonl", warmup)
    print(
        f"{args.out}: {len(warmup)} demonstrations, {len(training)} prompts, {len(held)} held out"
    )


if __name__ == "__main__":
    main()
