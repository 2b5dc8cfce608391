#!/usr/bin/env python3
"""Measure a Hugging Face folder on held-out problems, with nothing but transformers.

It shares no code with megarl, so that it can contradict it. Decoding is greedy. A response is right
if it ends within the limit, and what follows its last </think> equals ``answer``, both stripped::

    python tools/eval_hf.py HF_DIR heldout.jsonl --json result.json

``--forced-think`` forbids </think> as the first token. It measures what the model can do once it
works the problem out, and so how much of a gain is a better habit and how much is new skill.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

END_OF_THOUGHT = "</think>"


@torch.no_grad()
def generate(
    model: Any, prompts: list[list[int]], *, limit: int, stops: list[int], banned_first: list[int]
) -> list[list[int]]:
    """Greedy continuations, the stop token included where one came within ``limit`` tokens.

    Prompts are padded on the left: all rows then end at the same column, and the next token of
    every row is read there. Padding is masked out and positions count true tokens only.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    cache, columns = None, []
    for step in range(limit):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        cache, logits = output.past_key_values, output.logits[:, -1]
        if step == 0 and banned_first:
            logits[:, banned_first] = float("-inf")
        chosen = logits.argmax(-1)
        columns.append(chosen.masked_fill(done, stops[0]))
        done |= torch.isin(chosen, torch.tensor(stops))
        if done.all():
            break
        tokens, position = chosen[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
    rows = torch.stack(columns, -1).tolist()
    ends = [next((i + 1 for i, t in enumerate(row) if t in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def judge(tokenizer: Any, response: list[int], stops: list[int], answer: str) -> dict[str, Any]:
    finished = response[-1] in stops
    text = tokenizer.decode(response[:-1] if finished else response, skip_special_tokens=False)
    found = text.rpartition(END_OF_THOUGHT)[2].strip()
    return {
        "response": text,
        "tokens": len(response),
        "correct": finished and found == answer.strip(),
        "thought": not text.lstrip().startswith(END_OF_THOUGHT),
    }


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    named = model.generation_config.eos_token_id
    stops = named if isinstance(named, list) else [named]
    return list(dict.fromkeys(t for t in [*stops, tokenizer.eos_token_id] if t is not None))


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    lines = args.heldout.read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines if line.strip()]
    stops = stop_tokens(model, tokenizer)
    end = tokenizer.convert_tokens_to_ids(END_OF_THOUGHT)
    results: list[dict[str, Any]] = []
    started = time.perf_counter()
    for first in range(0, len(problems), args.batch):
        batch = problems[first : first + args.batch]
        prompts = [tokenizer(p["prompt"], add_special_tokens=False)["input_ids"] for p in batch]
        banned = [end] if args.forced_think else []
        responses = generate(
            model, prompts, limit=args.max_new_tokens, stops=stops, banned_first=banned
        )
        for problem, response in zip(batch, responses, strict=True):
            verdict = judge(tokenizer, response, stops, problem["answer"])
            results.append({"id": problem.get("id"), **verdict})
    total = len(results)
    return {
        "model": str(args.model),
        "heldout": str(args.heldout),
        "forced_think": args.forced_think,
        "accuracy": sum(r["correct"] for r in results) / total,
        "correct": sum(r["correct"] for r in results),
        "total": total,
        "thought_share": sum(r["thought"] for r in results) / total,
        "mean_tokens": sum(r["tokens"] for r in results) / total,
        "seconds": time.perf_counter() - started,
        "responses": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="HF_DIR")
    parser.add_argument("heldout", type=Path, metavar="HELDOUT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--forced-think", action="store_true")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    result = evaluate(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(
        f"accuracy {result['accuracy']:.3f} ({result['correct']}/{result['total']}), "
        f"works it out {result['thought_share']:.2f}, {result['mean_tokens']:.1f} tokens a response"
    )


if __name__ == "__main__":
    main()
