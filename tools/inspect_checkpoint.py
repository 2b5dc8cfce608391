#!/usr/bin/env python3
"""Say what a distributed checkpoint holds: tensors, shapes, chunks, step, model, digests::

    python tools/inspect_checkpoint.py runs/demo/rl/checkpoints/step_60
    python tools/inspect_checkpoint.py runs/demo/model_megatron --check
    python tools/inspect_checkpoint.py step_60 --compare step_80

CHECKPOINT is a run's step_N, what convert_hf_to_megatron.py made, or one part of either.
``--check`` reads every byte and names all that is wrong; ``--compare`` names every tensor that the
other has not, or has with other values, whatever layout each was written in. The exit code is 1 if
something was found. No model is built; pickles in a checkpoint are read as data alone.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.checkpoint.inspect import check, compare, describe
from megarl.errors import MegarlError


def rows(title: str, header: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """A table on a terminal; elsewhere a line each, with tabs."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        for line in [header, *lines]:
            print("\t".join(map(str, line)))
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*map(str, line))
    console.print(table)


def show(found: dict[str, Any]) -> None:
    print(found["checkpoint"] + ("" if found["step"] is None else f": step {found['step']}"))
    for kind in ("model", "critic"):
        for key, value in (found[kind] or {}).items():
            print(f"{kind}.{key}: {json.dumps(value)}")
    for name, part in found["parts"].items():
        ranks = "" if part["ranks"] is None else f", written by {part['ranks']} ranks"
        count = f"{len(part['tensors'])} tensors, {part['bytes']:,} bytes{ranks}"
        print(f"{name or 'weights'}: {count}")
        header = ("tensor", "shape", "dtype", "chunks", "cut into", "bytes")
        keys = ("shape", "dtype", "chunks", "grid", "bytes")
        rows(
            name or "weights",
            header,
            [(key, *(t[k] for k in keys)) for key, t in part["tensors"].items()],
        )
        if part["objects"]:
            rows(
                f"{name or 'weights'}: objects", ("object", "bytes"), list(part["objects"].items())
            )
    if found["imported"]:
        print(f"imported from {len(found['imported'])} tensors:")
        header = ("tensor", "digest", "shape", "dtype")
        lines = [(n, d["digest"], d["shape"], d["dtype"]) for n, d in found["imported"].items()]
        rows("digests of the import", header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="name every difference")
    parser.add_argument("--check", action="store_true", help="read all of it, name all faults")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        found: dict[str, Any] = {}
        if args.check:
            found["faults"] = check(args.checkpoint)
        if args.compare:
            found["differences"] = compare(args.checkpoint, args.compare)
        lists = dict(found)
        if args.json or not found:
            found |= describe(args.checkpoint)
    except MegarlError as e:
        print(f"inspect_checkpoint: {e}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found, indent=1))
    elif not lists:
        show(found)
    for kind, lines in ({} if args.json else lists).items():
        print("\n".join([f"{kind}: {len(lines)}", *lines]))
    return int(any(lists.values()))


if __name__ == "__main__":
    sys.exit(main())
