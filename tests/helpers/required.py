"""Pytest hooks: with MEGARL_REQUIRE_SGLANG=1 the tests against a real SGLang server must run.

One that is skipped fails, for whatever reason it was, and so does a session in which none ran.
"""

import os
from collections.abc import Iterator

import pytest

_ran = pytest.StashKey[int]()


def required() -> bool:
    return os.environ.get("MEGARL_REQUIRE_SGLANG") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:  # type: ignore[misc]
    report: pytest.TestReport = yield  # type: ignore[misc]
    if required() and item.get_closest_marker("sglang") is not None:
        if report.skipped and not hasattr(report, "wasxfail"):
            report.outcome = "failed"
            report.longrepr = f"skipped, with MEGARL_REQUIRE_SGLANG=1: {report.longrepr}"
        ran = report.when == "call" and report.outcome == "passed"
        item.session.stash[_ran] = item.session.stash.get(_ran, 0) + ran
    return report  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not required() or session.config.option.collectonly or session.stash.get(_ran, 0):
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("MEGARL_REQUIRE_SGLANG=1, and no test with a real SGLang server passed")
