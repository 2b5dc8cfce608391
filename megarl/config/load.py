"""From YAML files and ``key=value`` overrides to a ``Config``, or to every problem in them at once.

1. Files are merged left to right, then the overrides in their order. A file's own top-level
   ``include: [other.yaml, ...]`` (relative to that file) comes before the file itself.
2. A layer that names another ``algo.policy.name`` replaces the policy settings before it: the clip
   range of one objective never leaks into another. So it is with every choice that has a ``name``.
   A file that names an objective is a whole algorithm: nothing that earlier files set under
   ``algo`` remains; and one with ``model.config.model_type`` a whole architecture.
3. ``${section.key}`` and ``${oc.env:NAME}`` are resolved once, after merging.
4. The schema checks the result. An error says where the value came from.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megarl.config import fields
from megarl.config.rollout import REFUSED
from megarl.config.schema import Config
from megarl.errors import ConfigError, Problem

Tree = dict[str, Any]
COMMAND_LINE = "the command line"
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PLACEHOLDER = re.compile(
    r"(^|/)path/to(/|$)|^\?\?\?$|<[^<>]+>|\bCHANGE_?ME\b|(^|/)your[-_/]|^TODO\b", re.IGNORECASE
)


def load_config(
    files: Sequence[Path], overrides: Sequence[str], *, beneath: Mapping[str, Any] | None = None
) -> Config:
    """Merge, resolve and check. Raises ConfigError with every problem found, not only the first.

    ``beneath``: a first layer, for a command that does not need every setting a run must have.
    """
    reader = _Reader()
    if beneath is not None:
        reader.start(beneath)
    for path in files:
        reader.read(Path(path), ())
    for text in overrides:
        reader.override(text)
    data = reader.resolved()
    problems = reader.problems
    if data is not None:
        _prepare(data)
        # What a broken file would have set is unknown: do not call it missing as well.
        config, wrong = _build(data, reader.sources, complete=not problems)
        if config is not None and not problems and not wrong:
            return config
        problems = problems + wrong
    raise ConfigError(problems)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Tell files from ``key=value`` overrides in one list of command-line arguments."""
    overrides = [a for a in arguments if "=" in a and not _is_file(a)]
    return [Path(a) for a in arguments if a not in overrides], overrides


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # longer than a name may be
        return False


def dump_given(config: Config) -> str:
    """YAML of what was set; loading it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(_given(config))))


def dump_resolved(config: Config) -> str:
    """JSON of every setting, defaults included."""
    return config.model_dump_json(indent=1) + "\n"


class _Reader:
    """Collects layers, merged as they come, and what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}  # dotted key -> the layer that set it last
        self._merged: Tree = {}

    def start(self, layer: Mapping[str, Any]) -> None:
        self._merge(dict(layer), "by default")

    def read(self, path: Path, parents: tuple[Path, ...]) -> None:
        """Merge a file, its includes first."""
        if path.resolve() in parents:
            chain = " -> ".join(str(p) for p in [*parents, path.resolve()])
            self._problem(f"{path}: include", f"a cycle: {chain}", "files that do not include it")
            return
        data = self._parse(path)
        if data is None:
            return
        included = data.pop("include", None) or []
        if not isinstance(included, list) or not all(isinstance(x, str) for x in included):
            example = "a list of files, e.g. [algos/gspo.yaml]"
            self._problem(f"{path}: include", show(included), example)
            included = []
        for name in included:
            self.read(path.parent / name, (*parents, path.resolve()))
        if _names_an_objective(data):
            self._merged.pop("algo", None)
        if _is_an_architecture(data) and isinstance(self._merged.get("model"), dict):
            self._merged["model"].pop("config", None)
        self._merge(data, str(path))

    def _parse(self, path: Path) -> Tree | None:
        try:
            loaded = OmegaConf.load(io.StringIO(path.read_text("utf-8")))
        except yaml.MarkedYAMLError as e:
            line = f"line {e.problem_mark.line + 1}: " if e.problem_mark else ""
            self._problem(str(path), f"{line}{(e.problem or str(e)).strip()}", "YAML")
        except (FileNotFoundError, IsADirectoryError, PermissionError) as e:
            self._problem(str(path), (e.strerror or str(e)).lower(), "a readable YAML file")
        except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as e:
            self._problem(str(path), str(e).splitlines()[0], "YAML: sections with settings")
        else:
            if isinstance(loaded, DictConfig):
                return _plain(loaded)
            self._problem(str(path), "a list", "sections with settings")
        return None

    def override(self, text: str) -> None:
        key, equals, value = text.partition("=")
        example = "key=value, e.g. optim.lr=1e-5 (nothing: key=null; empty text: key='\"\"')"
        if not equals or not value.strip() or not _KEY.fullmatch(key):
            self._problem(f"override {text!r}", "not of the form key=value", example)
            return
        if key == "include":
            self._problem(f"override {text!r}", "include outside a file", "a further file argument")
            return
        try:
            layer = OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException) as e:
            reason = getattr(e, "problem", None) or str(e).splitlines()[0]
            self._problem(f"override {text!r}", f"not YAML after the =: {reason}", example)
            return
        self._merge(_plain(layer), COMMAND_LINE)

    def _merge(self, layer: Tree, label: str) -> None:
        # "monitor:" with every line under it commented out sets nothing; it does not erase.
        layer = {k: v for k, v in layer.items() if v is not None or not _is_section(k)}
        self._merged = _without_replaced(self._merged, layer)
        try:
            self._merged = _plain(OmegaConf.merge(self._merged, layer))
        except OmegaConfBaseException as e:
            self._problem(label, str(e).splitlines()[0], "sections with settings")
            return
        self.sources |= dict.fromkeys((key for key, _ in _flatten(layer)), label)

    def resolved(self) -> Tree | None:
        try:
            data: Any = OmegaConf.to_container(OmegaConf.create(self._merged), resolve=True)
        except OmegaConfBaseException as e:
            key = str(getattr(e, "full_key", None) or "${...}")
            self._problem(key, str(e).splitlines()[0], "an interpolation that can be resolved")
            return None
        return {str(key): value for key, value in data.items()}

    def _problem(self, key: str, found: str, accepted: str) -> None:
        self.problems.append(Problem(key, found, accepted))


def _build(
    data: Tree, sources: Mapping[str, str], *, complete: bool
) -> tuple[Config | None, list[Problem]]:
    """Check against the schema. ``complete`` False: missing keys are not reported."""
    config, problems = None, list(_special_values(data, sources))
    try:
        config = Config.model_validate(data)
    except ValidationError as e:
        for error in e.errors(include_url=False):
            if error["type"] != "missing" or isinstance(error["loc"][-1], int):  # a list too short
                problems.append(_problem_of(error, sources))
            elif complete:
                problems += _missing(fields.locate(error["loc"]))
    first = {p.key: p for p in reversed(problems)}
    return config, [p for p in problems if first[p.key] is p]


def _special_values(data: Tree, sources: Mapping[str, str]) -> Iterator[Problem]:
    """Values the schema would take although nobody can have meant them."""
    for key, value in _leaves(data):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and _PLACEHOLDER.search(item):
                yield Problem(key, f"{_from(item, key, sources)}, a placeholder", "your own value")
        place = _place(key)
        if isinstance(value, bool) and place.info and not fields.allows_bool(place.info):
            yield Problem(key, _from(value, key, sources), fields.accepted(place.info))


def _problem_of(error: Any, sources: Mapping[str, str]) -> Problem:
    """One pydantic error in our words: key, what was found and where, what is accepted."""
    place, kind = fields.locate(error["loc"]), error["type"]
    if kind == "missing":
        short = error["loc"][:-1]
        return _problem_of({**error, "loc": short, "type": "too_short"}, sources)
    if kind == "union_tag_not_found":
        assert place.info is not None
        return Problem(f"{place.key}.name", "nothing", ", ".join(fields.members(place.info)))
    if kind == "union_tag_invalid":
        assert place.info is not None
        key, tag, tags = f"{place.key}.name", error["ctx"]["tag"], list(fields.members(place.info))
        near = fields.nearest(tag, tags)
        hint = f"did you mean {near}? one of " if near else "one of "
        return Problem(key, _from(tag, key, sources), hint + ", ".join(tags))
    if place.info is None:
        source = _source(place.key, sources)
        return Problem(place.key, f"an unknown key{source}", _suggest(place))
    found, accepted = _from(error["input"], place.key, sources), fields.accepted(place.info)
    # 2024_01 is a number in YAML.
    quote = kind in ("string_type", "path_type") and isinstance(error["input"], int | float)
    return Problem(place.key, found, accepted + (" (in quotes)" if quote else ""))


def _suggest(place: fields.Place) -> str:
    """The valid key most likely meant, and the keys there are."""
    assert place.model is not None, place
    if place.key in REFUSED:
        return REFUSED[place.key]
    name, parent = place.name, place.key.removesuffix(place.name).rstrip(".")
    prefix, siblings = f"{parent}." if parent else "", list(place.model.model_fields)
    known = f"keys of {parent or 'a file'}: {', '.join(siblings)}"
    every = fields.settings()
    owners = [str(s.member) for s in every if s.key == place.key and s.member != place.member]
    if owners and place.member:
        only = f"an option of {', '.join(owners)} only"
        return f"{only}; {place.member} has: {', '.join(siblings)}"
    if any(s.key == f"{prefix}{name}" for s in every):  # a dotted key written as one word in YAML
        above, _, last = name.rpartition(".")
        return f"{last}: on a line of its own, indented below {above}:"
    if near := fields.nearest(name, siblings):
        return f"did you mean {prefix}{near}? {known}"
    by_name = {s.key.rpartition(".")[2]: s.key for s in reversed(every) if s.member is None}
    if near := fields.nearest(name, list(by_name)):
        return f"did you mean {by_name[near]}? {known}"
    return known


def _missing(place: fields.Place) -> list[Problem]:
    """The required settings at a place: of a whole section, each of them."""
    assert place.info is not None, place
    below = fields.section(place.info)
    if below is None:
        doc = fields.plain_doc(place.info)
        what = fields.accepted(place.info) + (f": {doc}" if doc else "")
        return [Problem(place.key, "nothing; it has to be set", what)]
    needed = [name for name, info in below.model_fields.items() if info.is_required()]
    return [p for name in needed for p in _missing(fields.locate([*place.key.split("."), name]))]


def _prepare(data: Tree, parts: tuple[str, ...] = ()) -> None:
    """``~`` in paths, which no shell expands inside YAML or after ``key=``."""
    for name, value in data.items():
        place = fields.locate([*parts, name])
        if isinstance(value, dict):
            _prepare(value, (*parts, name))
        elif isinstance(value, str) and value.startswith("~") and place.info is not None:
            data[name] = str(Path(value).expanduser()) if fields.is_path(place.info) else value


def _given(config: BaseModel) -> Tree:
    out: Tree = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        # A union member's name tells it from the others: keep it even where it is a default.
        tag = name == "name" and len(get_args(info.annotation)) == 1
        if name not in config.model_fields_set and not tag:
            continue
        if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            out[name] = [_given(item) for item in value]
        elif not isinstance(value, BaseModel):
            out[name] = config.model_dump(mode="json", include={name})[name]
        elif (below := _given(value)) or value != info.get_default():
            out[name] = below
    return out


def _escape(value: Any) -> Any:
    """Text that would read as an interpolation when loaded again."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def _plain(config: Any) -> Tree:
    data: Any = OmegaConf.to_container(config, resolve=False)
    return {str(key): value for key, value in data.items()}


def _flatten(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _leaves(data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Like ``_flatten``, and into lists of sections: ``rollout.length_stages[0].until_step``."""
    for key, value in _flatten(data):
        yield key, value
        for i, item in enumerate(value if isinstance(value, list) else []):
            if isinstance(item, dict):
                yield from ((f"{key}[{i}].{inner}", leaf) for inner, leaf in _leaves(item))


def _place(key: str) -> fields.Place:
    """Like ``fields.locate`` for a key of the data, where no union tag is written."""
    plain = re.sub(r"\[\d+\]", "[]", key)
    found = [s for s in fields.settings() if s.key == plain]
    return fields.Place(key, key, found[0].info if found else None, None, None)


def _is_section(name: str) -> bool:
    info = Config.model_fields.get(name)
    return info is not None and fields.section(info) is not None


def _names_an_objective(data: Tree) -> bool:
    algo = data.get("algo")
    policy = algo.get("policy") if isinstance(algo, dict) else None
    return isinstance(policy, dict) and "name" in policy


def _is_an_architecture(data: Tree) -> bool:
    model = data.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    return isinstance(config, dict) and "model_type" in config


def _without_replaced(data: Tree, layer: Tree, prefix: str = "") -> Tree:
    """``data`` without the choices of which ``layer`` names another."""
    kept = {}
    for key, value in data.items():
        new = layer.get(key)
        if isinstance(value, dict) and isinstance(new, dict):
            name = new.get("name")
            other = isinstance(name, str) and value.get("name") not in (None, name)
            if other and _is_choice(f"{prefix}{key}"):
                continue
            value = _without_replaced(value, new, f"{prefix}{key}.")
        kept[key] = value
    return kept


def _is_choice(key: str) -> bool:
    """Whether the section's name decides what else it holds."""
    return any(s.key == f"{key}.name" and s.member is not None for s in fields.settings())


def show(value: Any) -> str:
    """A value as an error quotes it: as in JSON, cut to one short line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _from(value: Any, key: str, sources: Mapping[str, str]) -> str:
    return show(value) + _source(key, sources)


def _source(key: str, sources: Mapping[str, str]) -> str:
    """`` (configs/a.yaml)``: the layer that set a key, its section, or something below it."""
    plain = re.sub(r"\[\d+\]", "", key)
    for at in (plain, *(plain.rsplit(".", n)[0] for n in range(1, plain.count(".") + 1))):
        if at in sources:
            return f" ({sources[at]})"
    below = [label for k, label in sources.items() if k.startswith(f"{plain}.")]
    return f" ({below[-1]})" if below else ""
