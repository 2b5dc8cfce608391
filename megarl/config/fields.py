"""The schema as data: its settings by dotted key, where an error is, and what a setting accepts.

``load.py`` words its errors with it, ``validate.py`` and ``unused.py`` look settings up, and
``docs.py`` prints it as a table. Nothing here knows a setting's name.
"""

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema import Config

Model = type[BaseModel]
_BOUNDS = ((at.Gt, ">", "gt"), (at.Ge, ">=", "ge"), (at.Lt, "<", "lt"), (at.Le, "<=", "le"))
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
}
_PLURAL: dict[Any, str] = {int: "integers", float: "numbers", str: "texts", Path: "paths"}


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema. ``member``: the union member it belongs to ("gspo"), if any. A list
    of sections is a leaf, and so is every setting of such a section (``a.list[].setting``).
    """

    key: str
    info: FieldInfo
    member: str | None = None

    @property
    def doc(self) -> str:
        return plain_doc(self.info)


@dataclass(frozen=True)
class Place:
    """Where a pydantic location leads. ``info`` is None at a key the schema does not have."""

    key: str
    name: str  # the last part of the key
    info: FieldInfo | None
    model: Model | None  # the section that holds the last key
    member: str | None  # of a union: whose option the last key is, or would be


def plain_doc(info: FieldInfo) -> str:
    """A setting's documentation on one line; a word broken at its hyphen is whole again."""
    text = re.sub(r"(?<=\w)-\n\s*", "-", info.description or "")
    return " ".join(text.replace("``", "`").split())


def members(info: FieldInfo) -> dict[str, Model]:
    """The sections of a discriminated union by their name; empty for any other field."""
    kind, tag = _required(info)
    if tag is None:
        return {}
    return {get_args(m.model_fields[tag].annotation)[0]: m for m in get_args(kind)}


def section(info: FieldInfo) -> Model | None:
    """The section a field holds, or None for a plain value or a union."""
    kind, _ = _required(info)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def listed(info: FieldInfo) -> Model | None:
    """The section that a field holds a list of, or None."""
    kind, _ = _required(info)
    item = (*get_args(kind), None)[0] if get_origin(kind) is tuple else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def nullable(info: FieldInfo) -> bool:
    return type(None) in get_args(info.annotation)


def _required(info: FieldInfo) -> tuple[Any, str | None]:
    """What a field holds when it is not null, and the discriminator of a union of sections."""
    kind, tag = info.annotation, info.discriminator
    others = [k for k in get_args(kind) if k is not type(None)]
    if nullable(info) and len(others) == 1:
        kind = others[0]
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            tag = next((m.discriminator for m in more if isinstance(m, FieldInfo)), None)
    return kind, None if tag is None else str(tag)


@cache
def settings() -> tuple[Setting, ...]:
    """Every leaf; an option of several union members appears once for each."""
    return tuple(_walk(Config, "", None))


def _walk(model: Model, prefix: str, member: str | None) -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        if below := section(info):
            yield from _walk(below, f"{key}.", member)
        elif union := members(info):
            for tag, one in union.items():
                yield from _walk(one, f"{key}.", tag)
        else:
            yield Setting(key, info, member)
            if item := listed(info):
                yield from _walk(item, f"{key}[].", member)


def locate(location: Sequence[int | str]) -> Place:
    """A pydantic error location as a dotted key; the union tags pydantic puts in are left out."""
    key, name, info, model, member = "", "", None, None, None
    below: Model | None = Config
    union: dict[str, Model] = {}
    for part in location:
        if union and part in union:
            below, member, union = union[str(part)], str(part), {}
            continue
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        key, name = f"{key}.{part}" if key else part, part
        model, info = below, below.model_fields.get(part) if below else None
        below = section(info) or listed(info) if info else None
        union = members(info) if info else {}
    return Place(key, name, info, model, member)


def accepted(info: FieldInfo) -> str:
    """What a setting takes, in words: ``an integer > 0, or null``."""
    if union := members(info):
        return f"a section with name: {', '.join(union)}" + (", or null" * nullable(info))
    if below := section(info):
        keys = ", ".join(below.model_fields)
        return f"a section with the keys {keys}" + (", or null" * nullable(info))
    if item := listed(info):
        keys = ", ".join(item.model_fields)
        return f"a list of sections with the keys {keys}" + (", or null" * nullable(info))
    return _describe(info.annotation, info.metadata)


def _describe(kind: Any, metadata: Sequence[Any] = ()) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        parts = [m for x in more for m in (x.metadata if isinstance(x, FieldInfo) else [x])]
        return _describe(inner, [*metadata, *parts])
    if origin is Literal:
        return "one of " + ", ".join(str(x) for x in get_args(kind))
    if origin in (Union, types.UnionType):
        return ", or ".join(_describe(x, metadata) for x in get_args(kind))
    if origin is tuple:
        items = get_args(kind)
        if get_origin(items[0]) is Literal:
            return f"a list of any of {', '.join(map(str, get_args(items[0])))}"
        count = "" if items[-1] is ... else f"{len(items)} "
        return f"a list of {count}{_PLURAL[items[0]]}"
    if kind is type(None):
        return "null"
    if origin is dict:
        return "a section with any keys"
    bounds = [
        f"{sign} {getattr(m, name)}"
        for m in metadata
        for t, sign, name in _BOUNDS
        if isinstance(m, t)
    ]
    return " ".join([_WORDS.get(kind, str(kind)), " and ".join(bounds)]).strip()


def allows_bool(info: FieldInfo) -> bool:
    return bool in (info.annotation, *get_args(info.annotation))


def is_path(info: FieldInfo) -> bool:
    return Path in (info.annotation, *get_args(info.annotation))


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The valid name a typing error most likely meant."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def given_keys(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything that was set, as opposed to left at its default.

    A section that was given without a setting (``algo.opsm: {}``) is there itself, if the default
    is another.
    """
    found: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        if name in config.model_fields_set:
            value, key = getattr(config, name), f"{prefix}{name}"
            below = given_keys(value, f"{key}.") if isinstance(value, BaseModel) else {}
            if below or (isinstance(value, BaseModel) and value == info.get_default()):
                found |= below
            else:
                found[key] = value
    return found


def field_of(config: BaseModel, key: str) -> FieldInfo:
    """What the schema says of a setting that ``config`` has; unions as they were chosen."""
    section, _, name = key.rpartition(".")
    return type(lookup(config, section) if section else config).model_fields[name]


def lookup(config: BaseModel, key: str) -> Any:
    """``lookup(config, "optim.lr")``"""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
