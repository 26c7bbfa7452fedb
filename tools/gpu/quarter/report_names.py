"""A pytest plugin that prints each failed test as a line of JSON as soon as the test has failed, and the counts.

python -m pytest -p report_names tests/storage
"""

import collections
import json
import os
from typing import Any


class _Names:
    def __init__(self, config: Any):
        self._config, self._outcomes = config, collections.Counter[str]()

    def _print(self, line: dict[str, Any]) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.write("\n" + json.dumps(line) + "\n", flush=True)  # pytest may be in a line of dots.

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self._print({"failed": report.nodeid, "when": report.when, "message": message[:1500]})

    def pytest_sessionfinish(self) -> None:
        self._print({"tests": dict(self._outcomes)})


def pytest_configure(config: Any) -> None:
    """Report in the process that collects the results of all workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Names(config), "names-of-failed-tests")
