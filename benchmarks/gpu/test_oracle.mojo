"""The benchmark's checks, on the CPU: right results pass and wrong ones do not."""

from std.testing import TestSuite, assert_raises

from chunks import Prefill
from decode import DecodeStep
from kernels.launch import KernelCall, run_cpu
from max.gpu.host import DeviceContext
from work import OurWork


def run[Call: KernelCall](work: OurWork[Call]) raises:
    for call in work.calls:
        run_cpu(call)


def check_decode[kpool: Int, next_n: Int](first_position: Int) raises:
    var ctx = DeviceContext(api="cpu")
    var step = DecodeStep[kpool, next_n](ctx, 5, first_position)
    run(step.ours())
    step.verify(0, 0)
    step.verify(0, step.copies - 1)


def test_decode_steps_of_ours_pass() raises:
    check_decode[4, 1](23)
    check_decode[4, 1](20)
    check_decode[4, 4](20)
    check_decode[16, 1](95)
    check_decode[16, 4](80)
    check_decode[16, 4](92)


def test_decode_check_sees_what_is_wrong() raises:
    var ctx = DeviceContext(api="cpu")
    var step = DecodeStep[4, 1](ctx, 3, 23)
    with assert_raises(contains="closed_pool of row 0: want 5, got 77"):
        step.verify(0, 0)
    run(step.ours())
    with step.pooled[0].part(0).map_to_host() as pooled:
        pooled[130] += 0.25
    with assert_raises(contains="pooled of row 1 channel 2: want"):
        step.verify(0, 0)
    with step.tail[0].part(1).map_to_host() as ring:
        ring[7] += 1
    with assert_raises(contains="ring element 7: want"):
        step.verify(0, 1)


def check_prefill[kpool: Int](tokens: Int, requests: Int) raises:
    var ctx = DeviceContext(api="cpu")
    var batch = Prefill[kpool](ctx, tokens, requests)
    run(batch.compress())
    run(batch.seed_tail())
    for copy in [0, batch.copies - 1]:
        batch.verify_pooled(copy, ragged=False, in_tree=False)
        batch.verify_tail(copy, ragged=False)
    batch.reset(ctx)
    run(batch.ragged_update())
    for copy in [0, batch.copies - 1]:
        batch.verify_pooled(copy, ragged=True, in_tree=False)
        batch.verify_tail(copy, ragged=True)


def test_prefills_of_ours_pass() raises:
    check_prefill[4](64, 5)
    check_prefill[4](31, 1)
    check_prefill[16](128, 7)


def test_prefill_check_sees_what_is_wrong() raises:
    var ctx = DeviceContext(api="cpu")
    var batch = Prefill[4](ctx, 32, 3)
    with assert_raises(contains="pooled: want"):
        batch.verify_pooled(0, ragged=False, in_tree=False)
    with assert_raises(contains="ring element"):
        batch.verify_tail(0, ragged=False)
    run(batch.compress())
    with assert_raises(contains="closed_pool of row 0: want 0, got 77"):
        batch.verify_pooled(0, ragged=True, in_tree=False)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
