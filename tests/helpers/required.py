"""Pytest hooks: with MEGARL_REQUIRE_SGLANG=1 the tests against a real SGLang server must run.

One that is skipped fails, for whatever reason it was, and so does a session in which none ran.
"""

import os
from collections.abc import Iterator

import pytest


def required() -> bool:
    return os.environ.get("MEGARL_REQUIRE_SGLANG") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:  # type: ignore[misc]
    report: pytest.TestReport = yield  # type: ignore[misc]
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if required() and skipped and item.get_closest_marker("sglang") is not None:
        report.outcome = "failed"
        report.longrepr = f"skipped, with MEGARL_REQUIRE_SGLANG=1: {report.longrepr}"
    return report  # type: ignore[return-value]


class Ran:
    """Counts them where all reports arrive, whichever process they ran in."""

    def __init__(self) -> None:
        self._passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.when == "call" and report.passed and "sglang" in report.keywords

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or self._passed:
            return
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(
                "MEGARL_REQUIRE_SGLANG=1, and no test with a real SGLang server passed"
            )


def pytest_configure(config: pytest.Config) -> None:
    if required() and not hasattr(config, "workerinput"):  # not in a worker of xdist's
        config.pluginmanager.register(Ran())
