"""PEP 517/660 build backend: setuptools, shown the torch that is already installed.

The extension must be compiled against the torch it will run with. If build-system.requires listed
torch, it would be downloaded a second time into the isolated build environment, gigabytes of
whichever build is the default. So it is not listed; instead:

1. Metadata never needs torch (setup.py skips the extension): a resolver can read what we depend on.
2. A build looks for torch where the environment being installed into keeps its packages. Isolation
   hides that folder, but the interpreter is the environment's own and `sysconfig` still names it.
3. Without torch there, the build stops at once and says what to do.
4. Without a C++ compiler, what was built is the package without its compiled operators (setup.py).
   pip shows nothing of a build that succeeds, so this is said past it.
"""

import importlib
import importlib.util
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from setuptools import build_meta

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return []  # all of them are in pyproject.toml; setuptools would run setup.py to ask


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(directory: str, config_settings: Settings = None) -> str:
    with _metadata_only():
        return build_meta.prepare_metadata_for_build_wheel(directory, config_settings)


def prepare_metadata_for_build_editable(directory: str, config_settings: Settings = None) -> str:
    with _metadata_only():
        return build_meta.prepare_metadata_for_build_editable(directory, config_settings)


def build_wheel(
    directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _expose_torch()
    with _said_aloud():
        return build_meta.build_wheel(directory, config_settings, metadata_directory)


def build_editable(
    directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _expose_torch()
    with _said_aloud():
        return build_meta.build_editable(directory, config_settings, metadata_directory)


def build_sdist(directory: str, config_settings: Settings = None) -> str:
    with _metadata_only():
        return build_meta.build_sdist(directory, config_settings)


@contextmanager
def _metadata_only() -> Iterator[None]:
    os.environ["MEGARL_METADATA_ONLY"] = "1"
    try:
        yield
    finally:
        del os.environ["MEGARL_METADATA_ONLY"]


@contextmanager
def _said_aloud() -> Iterator[None]:
    """What setup.py leaves out, also on the stderr of the front end, which is the parent process.

    Only where that is a terminal or a pipe: what another process writes into an ordinary file is
    overwritten by the one that has it open.
    """
    os.environ.pop("MEGARL_NOT_COMPILED", None)
    yield
    if (warning := os.environ.get("MEGARL_NOT_COMPILED")) is None:
        return
    try:
        target = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_NOCTTY)
    except OSError:  # not on Linux, or not ours to write to
        return
    with os.fdopen(target, "w") as stderr:
        kind = os.fstat(target).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
            print(f"\n{warning}", file=stderr)


def _expose_torch() -> None:
    """Make the target environment's torch importable, or stop."""
    if importlib.util.find_spec("torch"):
        return
    for place in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        if os.path.isdir(os.path.join(place, "torch")):
            sys.path.append(place)  # last: the isolated setuptools and ninja keep precedence
            importlib.invalidate_caches()
            return
    raise SystemExit(
        f"megarl is compiled against the torch it runs with, and {sys.prefix} has none. "
        "Install torch first (tools/setup_env.sh does), then repeat; with a front end that builds "
        "in an environment of its own, switch its isolation off."
    )
