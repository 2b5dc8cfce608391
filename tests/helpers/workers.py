"""A pytest hook: what runs in one process when `make test` has several.

A file's tests share what their module sets up, those of `tests/sglang` a server. It takes longest
to start: they come first.
"""

from pathlib import Path

import pytest

_TOGETHER = Path(__file__).parents[1] / "sglang"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        place = _TOGETHER if _TOGETHER in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(place.relative_to(config.rootpath))))
    items.sort(key=lambda item: _TOGETHER not in item.path.parents)
