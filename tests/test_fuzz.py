"""Twenty thousand random calls: the oracle's answer, or an error that says what."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits, own_line
from fuzz import OPERANDS, Fuzzed, draw, faulty, spoil
from fuzz_oracle import check
from models import Ring, compile_together

F32, F16, BF16 = DType.float32, DType.float16, DType.bfloat16
OPS = (
    Fuzzed("seed_tail", F32, 5, 4, ring_len=6),
    Fuzzed("seed_tail", BF16, 8, 3, ring_len=3),
    Fuzzed("tail_update", F32, 5, 4, ring_len=6, width=5),
    Fuzzed("tail_update", F16, 8, 2, ring_len=2, width=3),
    Fuzzed("tail_update", BF16, 16, 1, ring_len=1, width=2),
    Fuzzed("ragged_update", F32, 5, 4, ring_len=7),
    Fuzzed("ragged_update", BF16, 8, 3, ring_len=3),
    Fuzzed("ring_close", F16, 8, 4, ring_len=5),
    Fuzzed("ring_close", BF16, 5, 2, ring_len=2),
    Fuzzed("compress", F32, 5, 4),
    Fuzzed("compress", BF16, 8, 1),
    Fuzzed("expand_topk", F32, 0, 4, width=3),
    Fuzzed("copy_slots", F16, 7, 1, ring_len=3),
    Fuzzed("copy_slots", F32, 8, 1, ring_len=2, stacked=(3,)),
)
CALLS = 24_000


@pytest.mark.slow
def test_random_calls_are_right_or_refused(capsys):
    calls = compile_together(OPS)
    outcomes: Counter[str] = Counter()
    for seed in range(CALLS):
        rng = np.random.default_rng(seed)
        op = OPS[seed % len(OPS)]
        operands = draw(rng, op)
        if rng.random() < 0.5:
            spoil(rng, op, operands)
        ring = before = None
        if "tail" in operands:
            before = operands["tail"]
            ring = Ring(before, op.dtype)
        arguments = [ring if name == "tail" else operands[name] for name in operands]
        wrong = faulty(op, operands)
        try:
            got = calls[op](*arguments)
        except ValueError as error:
            line = own_line(error)
            assert wrong, f"seed {seed}: a right call was refused: {line}"
            named = re.match(rf"{op.op}: (\w+)", line)
            assert named and named[1] in OPERANDS[op.op], f"seed {seed}: {line}"
            if ring is not None:
                assert_same_bits(ring.storage(), before, f"seed {seed}: {line}")
            outcomes["refused"] += 1
            continue
        assert not wrong, f"seed {seed}: {op.op} took a wrong call"
        after = None if ring is None else ring.storage()
        try:
            check(op, operands, before, after, got)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {op.name}: {error}") from error
        outcomes["right"] += 1
    with capsys.disabled():
        print(f"\n{CALLS} calls: {dict(outcomes)}", end=" ")
    assert min(outcomes["right"], outcomes["refused"]) > CALLS // 10
