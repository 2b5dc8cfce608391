"""``docs/configuration.md``: every setting as a table, from the schema and its docstrings."""

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config import fields
from megarl.config.schema import Config

_HEAD = """\
# Configuration

<!-- Generated: megarl config docs > docs/configuration.md -->

A run is described by YAML files, merged left to right, and `key=value` overrides after them:

    megarl config check configs/quickstart.yaml optim.lr=1e-5 'rollout.urls=[http://node1:30000]'

* A file may begin with `include: [other.yaml, ...]`, relative to itself; those come before it.
* Naming another `algo.policy.name` drops the policy settings before it; so it is with every choice
  whose `name` decides what else there is to set. A file with an `algo.policy.name` is a whole
  algorithm: what earlier files set under `algo` is dropped. Settings of your own go behind it.
* `${section.key}` repeats another setting, `${oc.env:NAME}` an environment variable.
* An unknown key, a wrong type, a contradiction and a setting that would have no effect are errors.
  All of them are reported at once, before anything is started.
"""


def configuration_markdown() -> str:
    """The whole page. A test compares it with the file in the repository."""
    parts = [_HEAD]
    for name, info in Config.model_fields.items():
        model = fields.section(info)
        assert model is not None, name
        parts += _section(name, model)
    return "\n".join(parts)


def _section(name: str, model: type[BaseModel]) -> list[str]:
    parts = [f"## {name}\n", _table(model)]
    return parts + _below(name, model)


def _below(name: str, model: type[BaseModel]) -> list[str]:
    """The sections inside a section, and inside those."""
    parts: list[str] = []
    for field, info in model.model_fields.items():
        key = f"{name}.{field}"
        inner = {key: below} if (below := fields.section(info)) else {}
        if item := fields.listed(info):
            inner = {f"{key}[]": item}
        inner |= {f"{key}, name: {tag}": member for tag, member in fields.members(info).items()}
        for title, section in inner.items():
            parts += [f"### {title}\n", _table(section), *_below(title, section)]
    return parts


def _table(model: type[BaseModel]) -> str:
    lines = ["| key | accepted | default | |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        cells = (f"`{name}`", fields.accepted(info), _default(info), fields.plain_doc(info))
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value: Any = info.get_default()
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", "a section of defaults"))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return str(list(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
