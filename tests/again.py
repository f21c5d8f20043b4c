"""A plugin of pytest, `-p tests.again`: a test that failed beside others runs once more, alone.

A run in which at most three tests failed is green if each of them passes alone; each is named at
the end. More failures, an error of collection and the crash of a worker stay red.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

MOST = 3  # that failed; more are no accident


class Again:
    """The tests that failed, and what came of them alone."""

    def __init__(self) -> None:
        self._failed: list[str] = []
        self._is_red = False
        self._alone: dict[str, str] = {}  # name -> what pytest printed; empty = it passed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._is_red |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)
        # xdist has a word of its own for a test whose worker crashed
        self._is_red |= report.when not in ("setup", "call", "teardown")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or self._is_red or len(self._failed) > MOST:
            return
        command = [sys.executable, "-m", "pytest", "-q"]
        for name in self._failed:
            done = subprocess.run(
                [*command, name], cwd=session.config.rootpath, capture_output=True, text=True
            )
            passed = done.returncode == 0 and re.search(r"^1 passed", done.stdout, re.MULTILINE)
            self._alone[name] = "" if passed else done.stdout + done.stderr
        if not any(self._alone.values()):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, printed in self._alone.items():
            terminalreporter.write(printed)
            line = f"{name} failed alone as well" if printed else f"flaky: {name} passed alone"
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.maxfail:  # -x ends before the rest
        config.pluginmanager.register(Again())
