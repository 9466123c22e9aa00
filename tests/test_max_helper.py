"""MAX's own graph helper for seed_tail, unmodified, on top of our kernels."""

from __future__ import annotations

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph
from max.nn.kernels import mla_kpool_seed_tail

import kpool_graph
from asserts import assert_same_bits, run_seed_tail
from cases import ring_for, seed_operands
from models import Call, Ring, SeedTail, declare

OP = declare(SeedTail(DType.bfloat16, 128, 4, 4))


def load(custom_extensions):
    with Graph(
        "max_helper", input_types=OP.input_types, custom_extensions=custom_extensions
    ) as graph:
        mla_kpool_seed_tail(*graph.inputs, kpool=OP.kpool)
        graph.output()
    return InferenceSession(devices=[CPU()]).load(graph)


@pytest.mark.slow
def test_the_helper_of_max_leaves_the_ring_that_ours_leaves(models):
    call = Call(OP, load([kpool_graph.kernels_path()]))
    rng = np.random.default_rng(1)
    requests = [(7, 0, 1023), (0, 6, 5), (3, 1, 0), (8, 2**20 - 1, 2)]
    operands = seed_operands(rng, OP, requests)
    tail = ring_for(rng, OP)
    theirs, ours = Ring(tail, OP.dtype), Ring(tail, OP.dtype)
    run_seed_tail(call, theirs, *operands)
    models[OP](ours, *operands)
    assert_same_bits(theirs.storage(), ours.storage(), "ring")


@pytest.mark.slow
def test_the_helper_of_max_does_not_compile_for_a_cpu_without_our_kernels():
    with pytest.raises(RuntimeError) as error:
        load([])
    assert "is not supported by this build" in str(error.value.__cause__)
