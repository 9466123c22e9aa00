"""Checks and times the GPU kernels of this package and of MAX, side by side.

Cross-built for a machine that has a GPU and nothing else; see README.md. Prints
CSV, then a line an aim. A wrong result ends it with status 1 before that case is
timed.
"""

from std.random import seed

from decode import run_decode
from max.gpu.host import DeviceContext
from prefill import run_prefill
from report import Report

comptime _SEED = 1


def main() raises:
    seed(_SEED)
    var ctx = DeviceContext()
    print("#", ctx.name())
    var report = Report()
    for rows in [1, 8, 32, 64, 128, 256, 512]:
        comptime for kpool in [4, 16]:
            comptime for next_n in [1, 4]:
                run_decode[kpool, next_n](ctx, report, rows, closes=True)
                comptime if next_n < kpool:
                    run_decode[kpool, next_n](ctx, report, rows, closes=False)
    for tokens in [4096, 16384, 65536, 131072]:
        for requests in [1, 16, 64, 256]:
            comptime for kpool in [4, 16]:
                run_prefill[kpool](ctx, report, tokens, requests)
    report.close()
