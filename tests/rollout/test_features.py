"""Which servers are taken, and what a push asks of them, by version."""

import tomllib
from importlib.metadata import distributions

import pytest

from megarl import __version__
from megarl.errors import ServerError, UnfitServerError
from megarl.rollout.control import ServerControl
from megarl.rollout.features import (
    EMBEDDED,
    PLUGIN_FOLDER,
    PLUGIN_VERSION,
    Features,
    features_of,
    require_plugin,
    version_of,
)
from tests.rollout.conftest import Server


@pytest.mark.parametrize(
    "version, proves",
    [
        ("sglang 0.5.21", True),
        ("sglang 0.5.22.post1", True),
        ("sglang 0.5.23", True),
        ("sglang 0.5.23+cpu", True),
        (f"{EMBEDDED} {__version__}", False),
    ],
)
def test_sglang_needs_our_plugin_and_proves_what_it_loads(version: str, proves: bool) -> None:
    assert features_of(version).plugin is proves
    assert ServerControl("http://a:1", "key", version=version).proves is proves
    require_plugin(version, PLUGIN_VERSION)
    if proves:
        with pytest.raises(UnfitServerError, match=r"found nothing .*accepted: version"):
            require_plugin(version, "")
    else:
        require_plugin(version, "")


def test_the_plugin_has_one_version_wherever_it_is_written() -> None:
    """The folder is as good in a path as installed: its metadata names the same entry point."""
    project = tomllib.loads((PLUGIN_FOLDER / "pyproject.toml").read_text())["project"]
    [found] = distributions(name="megarl-sglang-plugin", path=[str(PLUGIN_FOLDER)])
    source = (PLUGIN_FOLDER / "megarl_sglang_plugin" / "__init__.py").read_text()
    assert f'\nVERSION = "{PLUGIN_VERSION}"\n' in source
    assert found.version == project["version"] == PLUGIN_VERSION
    assert found.name == project["name"]
    points = {(p.group, p.name): p.value for p in found.entry_points}
    [(group, entries)] = project["entry-points"].items()
    assert points == {(group, name): value for name, value in entries.items()}


@pytest.mark.parametrize(
    "version",
    ["sglang 0.5.20", "sglang 0.5.24", "sglang 0.6", "sglang 1.0.0", "sglang dev", "vllm 0.5.23",
     "", f"{EMBEDDED} 99.0.0", "sglang (no version)"],
)  # fmt: skip
def test_others_are_refused_with_those_that_are_known(version: str) -> None:
    with pytest.raises(ServerError) as caught:
        features_of(version)
    for words in ("sglang 0.5.21 to 0.5.23", EMBEDDED, "rollout.server_command"):
        assert words in str(caught.value)


def test_control_of_a_server_with_another_version_is_refused() -> None:
    with pytest.raises(ServerError, match=r"sglang 0\.4\.0"):
        ServerControl("http://a:1", "key", version="sglang 0.4.0")


def test_the_embedded_server_says_who_it_is(server: Server) -> None:
    told = server.get("/server_info")
    assert version_of(told) == f"{EMBEDDED} {__version__}"
    assert features_of(version_of(told)) == Features()
    assert told["boot"] == server.get("/server_info")["boot"]
