"""What the embedded server and the real SGLang answer to the same tests, side by side.

    python tools/contract_table.py [--only embedded] [pytest's arguments]

Runs tests/sglang/test_contract*.py (SGLang's part installs it where it is missing) and prints a
Markdown table: a line a test, its outcome on either server. Ends with pytest's exit status.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = sorted(map(str, (ROOT / "tests" / "sglang").glob("test_contract*.py")))
SERVERS = ("embedded", "sglang")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SERVERS, help="ask one of them")
    args, rest = parser.parse_known_args()
    chosen = ["-k", args.only] if args.only else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *SUITE, "-q", f"--junitxml={report}"]
        status = subprocess.run([*command, *chosen, *rest], cwd=ROOT, check=False).returncode
        if not report.exists():
            return status
        print("\n".join(table(outcomes(report))))
    return status


def outcomes(report: Path) -> dict[str, dict[str, str]]:
    """By test, and by server: passed, failed or skipped."""
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        parts = parameters.rstrip("]").split("-")
        server = next((s for s in SERVERS if s in parts), "")
        parts = [part for part in parts if part != server]
        title = name.removeprefix("test_").replace("_", " ")
        title += f" ({'-'.join(parts)})" if parts else ""
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        found.setdefault(title, {})[server] = "skipped" if "skipped" in tags else outcome
    return found


def table(found: dict[str, dict[str, str]]) -> list[str]:
    lines = ["", f"| contract | {' | '.join(SERVERS)} |", "|---|---|---|"]
    for title, by_server in found.items():
        cells = " | ".join(by_server.get(server, "-") for server in SERVERS)
        lines.append(f"| {title} | {cells} |")
    passed = [sum(o.get(s) == "passed" for o in found.values()) for s in SERVERS]
    lines.append(f"| **passed of {len(found)}** | {passed[0]} | {passed[1]} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
