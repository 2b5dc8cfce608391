"""Which pushes give servers the right weights: by server, precision, trainer's layout, transport.

    python tools/push_table.py [--only embedded] [pytest's arguments]

Runs the long matrix (tests/sync and tests/sglang: test_push_matrix.py; SGLang's part installs it
where it is missing) and prints a Markdown table: in every cell the transports that passed. Ends
with pytest's exit status.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITES = {
    "embedded": "tests/sync/test_push_matrix.py",
    "sglang": "tests/sglang/test_push_matrix.py",
}

Passed = dict[tuple[str, str], dict[str, list[str]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SUITES, help="one kind of servers")
    args, rest = parser.parse_known_args()
    chosen = [SUITES[args.only]] if args.only else list(SUITES.values())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # xunit2, pytest's default, has no properties of single tests.
        options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *chosen, *options, *rest]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if report.exists():
            print("\n".join(table(passed(report))))
    return status


def passed(report: Path) -> Passed:
    """By server and precision, and by layout: the transports."""
    found: Passed = defaultdict(lambda: defaultdict(list))
    for entry in ElementTree.parse(report).iter("property"):
        if entry.get("name") in ("cell", "push"):
            server, precision, layout, *way = entry.get("value", "").split("|")
            found[server, precision][layout] += way
    return found


def table(found: Passed) -> list[str]:
    layouts = list(dict.fromkeys(layout for cells in found.values() for layout in cells))
    ways = {way for cells in found.values() for some in cells.values() for way in some}
    lines = ["", f"| servers | precision | {' | '.join(layouts)} |"]
    lines.append("|---" * (2 + len(layouts)) + "|")
    for (server, precision), cells in sorted(found.items()):
        row = (_cell(cells[k], ways) for k in layouts)
        lines.append(f"| {server} | {precision} | {' | '.join(row)} |")
    return [*lines, "", f"all: {', '.join(sorted(ways))}"]


def _cell(its: list[str], ways: set[str]) -> str:
    if not its:
        return "-"
    return "all" if set(its) == ways else ", ".join(its)


if __name__ == "__main__":
    sys.exit(main())
