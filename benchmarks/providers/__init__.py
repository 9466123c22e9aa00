"""Who does the ops, and which of them are there.

Each module has a `prepare` that copies a problem's operands and returns a step. Peers
are imported only when they are asked for: any of them may not be installed. They do
less than the ops of this package: they take no padding and check no operand.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ..cases import COMPRESS, DECODE, FLOAT32, NEAR_CONTEXT, Case
from ..operands import Problem, make
from ..rows import COPY, EMPTY, OURS, OURS_NEAR
from .base import Prepared

MAX_OPS = "max ops"
NUMPY = "numpy"
TORCH = "torch"
TORCH_COMPILE = "torch.compile"
JAX = "jax"
TRANSFORMERS = "transformers"

NAMES = (OURS, COPY, EMPTY, MAX_OPS, NUMPY, TORCH, TORCH_COMPILE, JAX, TRANSFORMERS)
GRAPHS = (OURS, EMPTY, MAX_OPS)
_MODULES = {
    TORCH: "torch",
    TORCH_COMPILE: "torch",
    JAX: "jax",
    TRANSFORMERS: "transformers.models.glm5_next",
}
# Rebuilding the pools of a longer context takes more memory than a small machine has.
LONGEST_REBUILD = 131072

Prepare = Callable[[Problem], Prepared]


def missing(provider: str) -> str:
    """Says what a provider lacks.

    Args:
        provider: One of `NAMES`.

    Returns:
        The reason, or an empty string if it can run.
    """
    module = _MODULES.get(provider, "numpy")
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"there is no module {module}"
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if provider == TORCH_COMPILE and not any(map(shutil.which, compilers)):
        return "there is no C++ compiler"
    if provider == TRANSFORMERS and importlib.util.find_spec("torch") is None:
        return "there is no module torch"
    return ""


def choose(
    providers: Iterable[str], case: Case, threads: int, quick: bool
) -> list[str]:
    """Picks those that have something to say about a case.

    Args:
        providers: Of `NAMES`.
        case: The case.
        threads: CPUs of the process.
        quick: Whether a slow compile is a reason to leave one out.

    Returns:
        Those to time.
    """
    chosen = [each for each in providers if _applies(each, case, threads, quick)]
    if case.name == DECODE and case.n > NEAR_CONTEXT and OURS in chosen:
        chosen.append(OURS_NEAR)
    return chosen


def _applies(provider: str, case: Case, threads: int, quick: bool) -> bool:
    if provider == TRANSFORMERS:
        return case.name == DECODE and case.n <= LONGEST_REBUILD
    if case.name == DECODE:
        return provider in (OURS, EMPTY, COPY)
    if provider == MAX_OPS and quick:
        # MAX compiles a graph of many ops for the better part of a minute.
        return case.dtype == FLOAT32 and (case.op == COMPRESS or case.in_graph)
    # NumPy has one thread in any case.
    return provider != NUMPY or threads == 1


def load(
    providers: Iterable[str], cases: Iterable[Case], quick: bool
) -> Mapping[str, Prepare]:
    """Imports providers, and compiles the graphs of those that have some.

    Args:
        providers: Of `NAMES`, none of them missing.
        cases: What they will be asked for.
        quick: As for `choose`.

    Returns:
        What prepares a problem, by provider.
    """
    providers, found = tuple(providers), {COPY: prepare_copy}
    if set(providers) & set(GRAPHS):
        from . import max_graphs

        keys = []
        for case in cases:
            chosen = choose(providers, case, 1, quick)
            keys += max_graphs.graphs_of(case, chosen)
        models = max_graphs.compile_graphs(keys)
        for name in GRAPHS:
            found[name] = max_graphs.preparer(name, models)
            found[many(name)] = max_graphs.preparer(name, models, max_graphs.MANY)
        found[OURS_NEAR] = near(found[OURS])
    if NUMPY in providers:
        from . import numpy_peer

        found[NUMPY] = numpy_peer.prepare
    if TORCH in providers or TORCH_COMPILE in providers:
        from . import torch_peer

        found[TORCH] = torch_peer.prepare_eager
        found[TORCH_COMPILE] = torch_peer.prepare_compiled
    if JAX in providers:
        from . import jax_peer

        found[JAX] = jax_peer.prepare
    if TRANSFORMERS in providers:
        from . import transformers_peer

        found[TRANSFORMERS] = transformers_peer.prepare
    return found


def many(provider: str) -> str:
    """Names the graph that holds a provider's op several times.

    Args:
        provider: `kpool_graph` or `empty`.

    Returns:
        The name that `load` gives it.
    """
    return f"{provider}, many"


def near(prepare: Prepare) -> Prepare:
    """Makes the yardstick of a long context: the same token in the shortest one.

    Args:
        prepare: What prepares our op.

    Returns:
        What prepares it for the shortest context. It is verified there, not here.
    """

    def prepare_near(problem: Problem) -> Prepared:
        shortest = make(dataclasses.replace(problem.case, n=NEAR_CONTEXT))
        return Prepared(prepare(shortest).step, lambda _: problem.expected)

    return prepare_near


def prepare_copy(problem: Problem) -> Prepared:
    """Makes the yardstick: a copy of as many bytes as the op must move.

    Args:
        problem: The case.

    Returns:
        A step that reads half of the bytes and writes the other half.
    """
    source = np.ones(max(1, problem.bytes_moved // 2), np.uint8)
    target = np.ones_like(source)
    return Prepared(lambda: np.copyto(target, source), lambda _: problem.expected)
