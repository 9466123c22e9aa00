"""Fixtures, and the settings of the property tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

import models as compiled

# A compile or a busy machine is not a failure, and a CI run must repeat.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def models() -> dict[object, compiled.Call]:
    """Every declared graph, compiled. Slow once per session."""
    return compiled.compile_declared()
