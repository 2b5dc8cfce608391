"""Pytest hooks: what runs in one process when `make test` has several.

A file's tests share what their module sets up, those of `tests/sglang` a server. It takes longest
to start: they come first.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_TOGETHER = "tests/sglang/"


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER if nodeid.startswith(_TOGETHER) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(_TOGETHER))
