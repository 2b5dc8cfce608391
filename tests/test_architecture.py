"""The rules of docs/architecture.md that a program can check, and checks of the checker.

A rule is a pure function from sources ({path: text}) to violations, one sentence each. The first
tests run the rules on this repository; the rest run them on small made-up sources, so that a rule
which has stopped finding anything fails here instead of passing everywhere.

1. Imports go down the layers: never up, and never sideways between the parts of layers 1 to 3.
2. A third-party package is imported only by the part that owns it.
3. No module imports itself through others. (For 1, 2 and 3 imports inside functions count.)
4. Files and functions stay short.
5. No eval, exec or pickle, and no ending of processes by name, outside ALLOWED.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    {"types", "protocols", "config", "errors", "rundir", "installed"},
    {"ops", "mesh", "hostcomm"},
    {"algos", "models", "data"},
    {"actor", "rollout", "sync", "checkpoint", "monitor", "plan"},
    {
        "convert",
        "convert_display",
        "loop",
        "parts",
        "planning",
        "evaluation",
        "experience",
        "sources",
        "rollout_source",
        "transports",
        "collection",
        "schedule",
        "stock",
        "books",
        "informative",
        "staleness",
        "drift",
        "servers",
        "curriculum",
        "stopping",
        "operators",
        "relayout",
    },
    {
        "cli",
        "cli_arguments",
        "cli_servers",
        "train",
        "serve",
        "servers_command",
        "conformance",
        "model_logprobs",
    },
]
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# Layer 0 is one vocabulary, layers 4 and 5 are one program; in between, siblings are blind.
BLIND = (1, 2, 3)

# Package, or dotted module -> the files under megarl/ that may import it.
OWNERS = {
    "megatron": ["actor/*"],
    "transformer_engine": ["actor/*"],
    "aiohttp": ["rollout/*"],
    "httpx": ["rollout/*"],
    "requests": ["rollout/*"],
    "urllib.request": ["rollout/*"],
    "http.client": ["rollout/*"],
    "transformers": ["rollout/embedded*", "data/tokenizer.py"],
    "safetensors": ["sync/disk.py"],
    "matplotlib": ["monitor/*", "cli.py"],
    "tensorboard": ["monitor/*", "cli.py"],
    "torch.utils.tensorboard": ["monitor/*", "cli.py"],
    "rich": ["monitor/*", "plan/table.py", "cli.py", "convert_display.py"],
    "wandb": ["monitor/*"],
    "mlflow": ["monitor/*"],
    "trackio": ["monitor/*"],
}

MAX_LINES = {".py": 400, ".sh": 400, ".sbatch": 400, ".cpp": 300, ".cu": 300, ".h": 300}
MAX_FUNCTION_LINES = 60

PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
KILLERS = re.compile(r"\b(pkill|killall)\b")
# (file, what) -> why it may. An entry that no file needs any more is a violation too.
ALLOWED = {
    ("megarl/models/inert_pickle.py", "pickle"): "reads checkpoints' .metadata, builds no class",
    ("megarl/sync/tensor_handles.py", "pickle"): "SGLang's handles, which it wants so; reads none",
    ("tests/helpers/pickled.py", "pickle"): "writes what must be refused",
    ("tests/test_architecture.py", "kill by name"): "spells the commands it looks for",
    ("tests/data/test_recorded.py", "pickle"): "writes one to show that it is not opened",
}

CODE = ["megarl", "tools", "launch", "tests", "csrc", "build_backend", ".ci"]
CODE += ["setup.py", "Makefile"]

Sources = Mapping[str, str]

# --- the rules ------------------------------------------------------------------------------------


def layer_violations(sources: Sources) -> list[str]:
    """Rule 1."""
    found = []
    for path, source in sources.items():
        part = part_of(module_name(path))
        if part is not None and part not in LAYER:
            found.append(f"{path}: {part!r} is in no layer; add it to the table or move the file")
            continue
        level = LAYER[part] if part else -1  # megarl/__init__.py lies below everything
        targets = {part_of(n) for names in imports(path, source) for n in names[:1]}
        for other in sorted(t for t in targets if t in LAYER and t != part):
            if LAYER[other] > level:
                found.append(f"{path} imports {other}: up, from L{level} to L{LAYER[other]}")
            elif LAYER[other] == level and level in BLIND:
                found.append(f"{path} imports {other}: sideways in L{level}")
    return found


def ownership_violations(sources: Sources) -> list[str]:
    """Rule 2."""
    found = []
    for path, source in sources.items():
        names = {name for names in imports(path, source) for name in names}
        for package, owners in OWNERS.items():
            uses = any(f"{name}.".startswith(f"{package}.") for name in names)
            if uses and not any(fnmatch(path, f"megarl/{owner}") for owner in owners):
                found.append(f"{path} imports {package}, which only {' and '.join(owners)} may")
    return found


def import_cycles(sources: Sources) -> list[str]:
    """Rule 3. Depth first: a module met again while it is still open closes a cycle."""
    modules = {module_name(path): path for path in sources}
    graph = {}
    for module, path in modules.items():
        candidates = imports(path, sources[path])
        graph[module] = {n for c in candidates if (n := next((m for m in c if m in modules), None))}
    found: list[str] = []
    done: set[str] = set()
    opened: list[str] = []

    def visit(module: str) -> None:
        if module in opened:
            found.append(" -> ".join([*opened[opened.index(module) :], module]))
        elif module not in done:
            opened.append(module)
            for target in sorted(graph[module]):
                visit(target)
            done.add(opened.pop())

    for module in sorted(graph):
        visit(module)
    return found


def size_violations(sources: Sources) -> list[str]:
    """Rule 4."""
    found = []
    for path, source in sources.items():
        lines, most = source.count("\n"), MAX_LINES.get(Path(path).suffix)
        if most is not None and lines > most:
            found.append(f"{path} has {lines} lines, the most is {most}")
        for node in nodes(path, source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(
                        f"{path}:{node.lineno} {node.name} has {lines} lines, "
                        f"the most is {MAX_FUNCTION_LINES}"
                    )
    return found


def danger_violations(sources: Sources, allowed: Mapping[tuple[str, str], str]) -> list[str]:
    """Rule 5, in both directions: what is used is allowed, what is allowed is used."""
    used = {(path, danger) for path, source in sources.items() for danger in dangers(path, source)}
    unknown = [f"{path}: {danger} is not on the allow-list" for path, danger in used - set(allowed)]
    stale = [f"{path}: allowed {danger}, but has none" for path, danger in set(allowed) - used]
    return sorted(unknown + stale)


# --- reading sources ------------------------------------------------------------------------------


def dangers(path: str, source: str) -> Iterator[str]:
    if KILLERS.search(source):
        yield "kill by name"
    for names in imports(path, source):
        if names[-1].split(".")[0] in PICKLES or "multiprocessing.reduction" in names:
            yield "pickle"
    for node in nodes(path, source):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield node.func.id
            if any(is_false(k.value) for k in node.keywords if k.arg == "weights_only"):
                yield "pickle"  # torch.load(..., weights_only=False)


def imports(path: str, source: str) -> Iterator[list[str]]:
    """What each import may mean, most specific first: `from a import b` is ["a.b", "a"]."""
    package = module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package.pop()
    for node in nodes(path, source):
        if isinstance(node, ast.Import):
            yield from ([alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package the file is in, each further dot its parent.
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            yield from ([f"{base}.{alias.name}", base] for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ([arg.value] for arg in node.args[:1] if is_text(arg))


def module_name(path: str) -> str:
    """megarl/ops/__init__.py -> megarl.ops"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of(module: str) -> str | None:
    """megarl.actor.step -> actor; None for megarl itself and for everything that is not ours."""
    names = module.split(".")
    return names[1] if names[0] == "megarl" and len(names) > 1 else None


def nodes(path: str, source: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source, path)) if path.endswith(".py") else iter(())


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def read_sources(*places: str) -> dict[str, str]:
    """The text files below `places`, by path relative to the root."""
    files = [f for place in places for f in [ROOT / place, *sorted((ROOT / place).rglob("*"))]]
    texts = {}
    for file in files:
        if file.is_file() and file.suffix not in (".so", ".pyc"):
            texts[file.relative_to(ROOT).as_posix()] = file.read_text(errors="replace")
    return texts


# --- this repository ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [layer_violations, ownership_violations, import_cycles])
def test_the_package_keeps_its_layers(rule):
    package = {path: text for path, text in read_sources("megarl").items() if path.endswith(".py")}
    assert len(package) > 5, "the package was not found"
    assert rule(package) == []


def test_files_and_functions_are_short():
    assert size_violations(read_sources(*CODE)) == []


def test_dangerous_calls_are_on_the_allow_list():
    assert danger_violations(read_sources(*CODE), ALLOWED) == []


# --- the checker itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source", "violation"),
    [
        ("megarl/algos/kl.py", "from megarl.actor.step import x", "actor: up, from L2 to L3"),
        ("megarl/algos/kl.py", "import megarl.loop", "loop: up, from L2 to L4"),
        ("megarl/algos/kl.py", "from megarl import train", "train: up, from L2 to L5"),
        ("megarl/algos/kl.py", "from ..actor import step", "actor: up, from L2"),
        ("megarl/algos/kl.py", "def f():\n    from megarl.data import x", "data: sideways in L2"),
        ("megarl/algos/__init__.py", "from ..models import x", "models: sideways in L2"),
        ("megarl/mesh.py", "from megarl.ops import segment_sum", "ops: sideways in L1"),
        ("megarl/actor/a.py", "importlib.import_module('megarl.sync.ipc')", "sync: sideways in L3"),
        ("megarl/__init__.py", "from megarl.types import Sample", "types: up, from L-1"),
        ("megarl/utils/x.py", "", "'utils' is in no layer"),
    ],
)
def test_layer_rule_finds(path, source, violation):
    found = layer_violations({path: source})
    assert len(found) == 1
    assert violation in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megarl/loop.py", "from megarl import actor, experience\nimport megarl.sync.disk"),
        ("megarl/protocols.py", "from megarl.types import Sample"),
        ("megarl/algos/ratio.py", "from . import kl\nfrom .kl import k3\nfrom megarl.ops import x"),
        ("megarl/cli.py", "from megarl import __version__\nimport torch"),
        ("megarl/monitor/__init__.py", "from .sinks import Sink\nfrom ..types import Metric"),
    ],
)
def test_layer_rule_accepts(path, source):
    assert layer_violations({path: source}) == []


@pytest.mark.parametrize(
    ("path", "source", "package"),
    [
        ("megarl/algos/kl.py", "def f():\n    import megatron.core.utils as u", "megatron"),
        ("megarl/sync/http.py", "from aiohttp import ClientSession", "aiohttp"),
        ("megarl/monitor/a.py", "from urllib import request", "urllib.request"),
        ("megarl/rollout/client.py", "import transformers", "transformers"),
        ("megarl/sync/push.py", "from safetensors.torch import save_file", "safetensors"),
        ("megarl/loop.py", "from torch.utils import tensorboard", "torch.utils.tensorboard"),
        ("megarl/cli.py", "import wandb", "wandb"),
    ],
)
def test_ownership_rule_finds(path, source, package):
    found = ownership_violations({path: source})
    assert len(found) == 1
    assert found[0].startswith(f"{path} imports {package}, ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megarl/actor/step.py", "from megatron.core import parallel_state"),
        ("megarl/rollout/embedded_engine.py", "import transformers"),
        ("megarl/data/tokenizer.py", "from transformers import AutoTokenizer"),
        ("megarl/algos/kl.py", "import urllib.parse, megatronic, richer"),
        ("megarl/cli.py", "from rich.console import Console"),
    ],
)
def test_ownership_rule_accepts(path, source):
    assert ownership_violations({path: source}) == []


def test_cycle_rule_finds_cycles_through_packages_and_functions():
    cyclic = {
        "megarl/data/__init__.py": "from .packing import pack",
        "megarl/data/packing.py": "from megarl.data import rewards",
        "megarl/data/rewards.py": "def f():\n    import megarl.data",
    }
    assert import_cycles(cyclic) == [
        "megarl.data -> megarl.data.packing -> megarl.data.rewards -> megarl.data"
    ]
    diamond = {
        "megarl/data/__init__.py": "from .a import x\nfrom .b import y",
        "megarl/data/a.py": "from megarl.data import c",
        "megarl/data/b.py": "from megarl.data.c import z\nimport torch",
        "megarl/data/c.py": "",
    }
    assert import_cycles(diamond) == []


def test_size_rule_counts_lines():
    def function(lines: int) -> str:
        return "async def f():\n" + "    x = 1\n" * (lines - 1)

    assert size_violations({"a.py": function(60), "b.cpp": "\n" * 300, "c.py": "\n" * 400}) == []
    found = size_violations({"a.py": function(61), "b.cpp": "\n" * 301, "c.py": "\n" * 401})
    assert found == [
        "a.py:1 f has 61 lines, the most is 60",
        "b.cpp has 301 lines, the most is 300",
        "c.py has 401 lines, the most is 400",
    ]


@pytest.mark.parametrize(
    ("path", "source", "danger"),
    [
        ("tools/a.sh", "killall python", "kill by name"),
        ("tests/a.py", "run(['pkill', '-f', 'x'])", "kill by name"),
        ("megarl/a.py", "y = eval(text)", "eval"),
        ("megarl/a.py", "exec(text)", "exec"),
        ("megarl/a.py", "def f():\n    from pickle import loads", "pickle"),
        ("megarl/a.py", "import cloudpickle as c", "pickle"),
        ("megarl/a.py", "from multiprocessing.reduction import ForkingPickler", "pickle"),
        ("megarl/a.py", "torch.load(f, weights_only=False)", "pickle"),
    ],
)
def test_danger_rule_finds(path, source, danger):
    assert danger_violations({path: source}, {}) == [f"{path}: {danger} is not on the allow-list"]
    assert danger_violations({path: source}, {(path, danger): "a reason"}) == []


def test_danger_rule_accepts_harmless_look_alikes_and_reports_stale_entries():
    harmless = "model.eval()\ntorch.load(f, weights_only=True)\nskill = 1\nimport picklejar"
    assert danger_violations({"megarl/a.py": harmless}, {}) == []
    assert danger_violations({}, {("megarl/a.py", "pickle"): "gone"}) == [
        "megarl/a.py: allowed pickle, but has none"
    ]
