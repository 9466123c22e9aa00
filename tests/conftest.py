"""Fixtures, and the settings of the property tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

import models as compiled


def import_max_nn() -> None:
    """Imports max.nn without what that does to child processes.

    Its native code sets variables, unseen by os.environ, that make every later
    child of this interpreter another Python, without the installed packages.
    """
    try:
        import max.nn.kernels  # noqa: F401
    except ImportError as error:
        raise ImportError("the tests need max.nn: see `make doctor`") from error

    for name in ("PYTHONEXECUTABLE", "PYTHONPATH"):
        if name in os.environ:
            os.putenv(name, os.environ[name])
        else:
            os.unsetenv(name)


# Before any test module does.
import_max_nn()

# A compile or a busy machine is not a failure, and a CI run must repeat.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_report_header() -> str:
    """Says why the first modules take long."""
    return "graphs: MAX compiles them in the first run, for some minutes"


@pytest.fixture(scope="session")
def models() -> dict[object, compiled.Call]:
    """Every declared graph, compiled. Slow once per session."""
    return compiled.compile_declared()
