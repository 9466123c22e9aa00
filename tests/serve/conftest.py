"""Checkpoints, and what they answer."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
from prompts import wanted_answers

from kpool_graph.serve_demo import example_folder


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """Makes the example's checkpoint as its README says; one of each kpool."""
    made = {}

    def make(kpool):
        if kpool not in made:
            made[kpool] = tmp_path_factory.mktemp("checkpoint") / f"kpool{kpool}"
            subprocess.run(
                [
                    sys.executable,
                    str(example_folder() / "make_checkpoint.py"),
                    str(made[kpool]),
                    f"--kpool={kpool}",
                ],
                check=True,
            )
        return made[kpool]

    return make


@pytest.fixture(scope="session")
def wanted(make_checkpoint):
    """What the reference answers to a list of prompts; each is computed once."""

    @cache
    def compute(kpool, prompts):
        return wanted_answers(make_checkpoint(kpool), prompts)

    return lambda kpool, prompts: compute(kpool, tuple(prompts))
