"""The benchmarks verify before they time, and say what they did not measure."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    cases,
    cli,
    kernel_level,
    operands,
    plot,
    providers,
    rows,
    run,
    summary,
    targets,
    timing,
    verify,
)
from benchmarks.cases import Case
from benchmarks.providers import numpy_peer
from benchmarks.providers.base import Prepared
from benchmarks.rows import EXECUTE, GRAPH, KERNEL, OURS, Row

ROOT = Path(__file__).resolve().parents[1]
SMALL = Case(cases.CLOSING, cases.TAIL_UPDATE, cases.FLOAT32, 8, 8, 4, 1)
COMMAND = "python -m benchmarks run --only 'a,b'"
CONDITIONS = run.Conditions(threads=1, quick=True, command=COMMAND)

EVERY_KIND = (
    SMALL,
    dataclasses.replace(SMALL, name=cases.OPEN),
    dataclasses.replace(SMALL, dtype=cases.BFLOAT16, next_n=4),
    dataclasses.replace(SMALL, name=cases.OPEN, kpool=16, next_n=4),
    dataclasses.replace(SMALL, kpool=16, next_n=4),
    Case(cases.DECODE, cases.TAIL_UPDATE, cases.FLOAT32, 1024, 1, 4, 1),
    Case(cases.COMPRESS, cases.COMPRESS, cases.FLOAT32, 256, 16),
    Case(cases.RAGGED_UPDATE, cases.RAGGED_UPDATE, cases.FLOAT32, 256, 16),
    Case(cases.RAGGED_UPDATE, cases.RAGGED_UPDATE, cases.BFLOAT16, 64, 60),
    Case(cases.SEED_TAIL, cases.SEED_TAIL, cases.BFLOAT16, 256, 100),
    Case(cases.EXPAND_TOPK, cases.EXPAND_TOPK, cases.INT32, 4, 4),
)


def a_row(**columns: object) -> Row:
    row = Row(
        level=EXECUTE,
        case=cases.CLOSING,
        provider=OURS,
        status=rows.OK,
        op=cases.TAIL_UPDATE,
        dtype=cases.FLOAT32,
        n=256,
        requests=256,
        kpool=4,
        next_n=1,
        threads=1,
        bytes_moved=1024,
        median_us=50.0,
        p20_us=45.0,
        p80_us=60.0,
        ratio=1.0,
        ratio_p20=1.0,
        ratio_p80=1.0,
        versions="max 1, numpy 2",
        cpu='a "CPU", 2 CPUs',
        command=COMMAND,
    )
    return dataclasses.replace(row, **columns)


def a_peer(provider: str, ratio: float, **columns: object) -> Row:
    spread = {"ratio": ratio, "ratio_p20": ratio * 0.9, "ratio_p80": ratio * 1.25}
    return a_row(provider=provider, **{**spread, **columns})


def test_rows_come_back_from_the_csv_as_they_were_written(tmp_path):
    written = [a_row(), a_row(status=rows.WRONG, median_us=None, ratio=None)]
    rows.write_csv(tmp_path / "made" / "run.csv", written)
    assert rows.read_csv(tmp_path / "made" / "run.csv") == written


def test_a_csv_of_other_columns_is_refused(tmp_path):
    (tmp_path / "run.csv").write_text("case,provider\nx,y\n")
    with pytest.raises(ValueError, match="columns must be"):
        rows.read_csv(tmp_path / "run.csv")


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_case_ids_are_unique_and_cover_every_op(quick):
    chosen = cases.choose(quick, threads=1)
    assert len({case.id for case in chosen}) == len(chosen)
    assert {case.op for case in chosen} == {case.op for case in EVERY_KIND}


def test_every_quick_case_is_a_full_case():
    assert set(cases.quick_cases()) <= set(cases.all_cases())


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_two_threads_time_what_threads_share(quick):
    shared = cases.choose(quick, threads=2)
    assert {case.name for case in shared} == {cases.COMPRESS, cases.CLOSING}
    assert set(shared) < set(cases.choose(quick, threads=1))


def test_long_contexts_are_timed_beside_the_shortest():
    near, *far = (case for case in cases.all_cases() if case.name == cases.DECODE)
    assert rows.OURS_NEAR not in providers.choose(providers.NAMES, near, 1, False)
    for case in far:
        assert rows.OURS_NEAR in providers.choose(providers.NAMES, case, 1, False)


def test_only_takes_a_part_or_a_pattern():
    ids = [case.id for case in cases.choose(False, 1, only="n256/*/k16")]
    assert ids and all("/n256/" in each and "/k16/" in each for each in ids)
    assert not cases.choose(False, 1, only="nothing of the kind")


@pytest.mark.parametrize("case", EVERY_KIND, ids=lambda case: case.id)
def test_numpy_peer_agrees_with_the_oracle(case):
    problem = operands.make(case)
    prepared = numpy_peer.prepare(problem)
    assert verify.mismatch(problem, prepared.read(prepared.step())) == ""


def test_positions_close_or_leave_open_every_pool_as_the_case_says():
    for case in cases.all_cases():
        if case.op == cases.TAIL_UPDATE and case.n <= 64:
            closed = operands.make(case).expected.ints
            assert (
                (closed < 0).all() if case.name == cases.OPEN else (closed >= 0).all()
            )


def test_bytes_moved_by_a_closing_row_are_counted_by_hand():
    head = cases.HEAD_DIM * 4
    # Key and gate read and stashed, three members of each read, one key written.
    assert operands.make(SMALL).bytes_moved == 8 * head * (4 + 6 + 1)


FAULTS = {
    "one ulp too many": lambda outcome: outcome.pooled.__setitem__((0, 0, 5), 9.0),
    "not a number": lambda outcome: outcome.pooled.__setitem__((3, 0, 0), math.nan),
    "another pool": lambda outcome: outcome.ints.__setitem__((7, 0), 3),
    "a lost stash": lambda outcome: outcome.tail.__setitem__(slice(0, -1), 0),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_provider_writes_no_time(fault, capsys):
    def broken(problem):
        prepared = numpy_peer.prepare(problem)

        def read(outputs):
            outcome = prepared.read(outputs)
            fault(outcome)
            return outcome

        return Prepared(prepared.step, read)

    names = (OURS, providers.COPY, providers.NUMPY)
    prepare = {
        OURS: numpy_peer.prepare,
        providers.COPY: providers.prepare_copy,
        providers.NUMPY: broken,
    }
    found = run.run([SMALL], names, prepare, CONDITIONS)
    by_name = {row.provider: row for row in found if row.level == EXECUTE}
    assert by_name[providers.NUMPY].status == rows.WRONG
    assert by_name[providers.NUMPY].median_us is None
    assert by_name[providers.NUMPY].ratio is None
    assert by_name[OURS].median_us > 0
    assert by_name[providers.COPY].ratio > 0
    assert "numpy is wrong:" in capsys.readouterr().err
    assert "wrong" in summary.text(found)


def test_a_provider_that_raises_is_failed_and_the_others_are_timed(capsys):
    def raises(problem):
        raise RuntimeError("out of luck")

    prepare = {OURS: numpy_peer.prepare, providers.JAX: raises}
    found = run.run([SMALL], (OURS, providers.JAX), prepare, CONDITIONS)
    assert {row.provider: row.status for row in found if row.level == EXECUTE} == {
        OURS: rows.OK,
        providers.JAX: rows.FAILED,
    }
    assert "out of luck" in capsys.readouterr().err


def test_a_provider_that_is_not_there_is_reported_not_installed():
    found = run.run(
        [SMALL], (OURS, providers.TORCH), {OURS: numpy_peer.prepare}, CONDITIONS
    )
    torch = next(row for row in found if row.provider == providers.TORCH)
    assert torch.status == rows.NOT_INSTALLED and torch.median_us is None
    assert "Not installed: torch" in summary.text(found)


def test_missing_modules_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert providers.missing(providers.JAX) == "there is no module jax"


@pytest.mark.parametrize(
    ("statuses", "worker", "code"),
    [
        ([rows.OK], 0, 0),
        ([rows.OK, rows.NOT_INSTALLED], 0, 0),
        ([rows.OK, rows.WRONG], 0, 1),
        ([rows.OK, rows.FAILED], 0, 1),
        ([rows.OK], 3, 1),
    ],
)
def test_exit_status_of_a_run(statuses, worker, code, monkeypatch, tmp_path, capsys):
    def start(options, _):
        if "--csv" in options:
            path = Path(options[options.index("--csv") + 1])
            rows.write_csv(path, [a_row(status=status) for status in statuses])
        return worker

    monkeypatch.setattr(cli, "_start", start)
    monkeypatch.setattr(cli, "_draw", lambda found, out: True)
    out = ["--out", str(tmp_path)]
    assert cli.main(["run", "--quick", "--only", "n256", *out]) == code
    assert (tmp_path / "cpu.csv").is_file()


def test_an_unknown_provider_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--providers", "numpy,abacus"])
    assert "got abacus" in capsys.readouterr().err


def test_rounds_take_turns_and_samples_are_long_enough():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    effort = timing.Effort(rounds=4, turn_ns=1, case_ns=10**9)
    times = timing.interleave(steps, effort)
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}
    assert all((values > 0).all() for values in times.values())
    # A step this short is called often enough to outlast the clock.
    assert len(calls) > 4 * 2 * 10


def test_slow_cases_get_fewer_rounds_but_enough_for_a_spread():
    effort = timing.Effort(rounds=1000, turn_ns=1, case_ns=1)
    times = timing.interleave({"slow": lambda: None}, effort)
    assert len(times["slow"]) == timing.LEAST_ROUNDS


def test_summary_shows_ratios_with_spread_and_never_a_time_alone():
    text = summary.text([a_row(), a_peer("numpy", 8.0), a_peer("copy", 0.5)])
    assert "8 (7.2..10)" in text
    assert "0.5 (0.45..0.625)" in text
    assert "execute: tail_update_closing, float32, kpool 4, next_n 1, 1 thread" in text
    assert "50 (45..60)" in text
    assert COMMAND in text and "max 1, numpy 2" in text


def reached(found: list[Row]) -> dict[str, tuple[float, bool]]:
    measured = {
        target.text: (target, target.measure(found)) for target in targets.TARGETS
    }
    return {
        text: (round(figure.value, 6), target.holds(figure))
        for text, (target, figure) in measured.items()
        if figure is not None
    }


def test_targets_read_the_rows_they_are_about():
    decode = {"case": cases.DECODE, "requests": 1}
    found = [
        a_peer("numpy", 6.5),
        a_peer("torch", 6.5),
        a_peer("copy", 0.5, level=KERNEL),
        a_row(level=GRAPH, n=1, median_us=1.5),
        a_row(level=GRAPH, median_us=40.0, threads=2),
        a_peer(rows.OURS_NEAR, 0.8, n=1048576, **decode),
        a_peer("transformers", 2e4, n=131072, **decode),
    ]
    assert reached(found) == {
        "execute, 256 rows close, float32, over numpy": (6.5, True),
        "execute, 256 rows close, float32, over torch": (6.5, False),
        "kernel over a copy of its bytes, 256 rows close, float32": (2.0, False),
        "one more op in a graph, 1 row closes, float32": (1.5, True),
        "one more op in a graph, 256 rows close, float32, two threads": (40.0, True),
        "a decoded token at 128k context over the rebuild": (2e4, True),
        "a decoded token at 1M context over one at 1k": (1.25, False),
    }


def test_targets_that_no_row_is_about_are_not_measured():
    assert reached([a_row(n=7)]) == {}
    assert summary.text([a_row(n=7)]).count("not measured") == len(targets.TARGETS)


def test_figures_take_their_points_from_the_rows():
    found = [
        a_row(n=256),
        a_row(n=8, median_us=20.0),
        a_row(n=8, dtype=cases.BFLOAT16),
        a_row(n=8, level=GRAPH, median_us=5.0),
        a_peer("copy", 0.1, n=8, level=GRAPH),
        a_peer("numpy", 3.0, n=8, status=rows.WRONG, median_us=None),
        a_peer("transformers", 9.0, n=1024, case=cases.DECODE, median_us=450.0),
    ]
    batch = plot.batch_figure(found)
    assert {
        label: [(point.x, point.us) for point in points]
        for label, points in batch.lines.items()
    } == {
        OURS: [(8, 20.0), (256, 50.0)],
        f"{OURS}, one more op in a graph": [(8, 5.0)],
    }
    assert "float32, head_dim 128, kpool 4, one thread" in batch.conditions
    (context,) = plot.context_figure(found).lines.values()
    assert [(point.x, point.us) for point in context] == [(1024, 450.0)]
    assert plot.batch_figure([]).lines == {}


MOJO_LINES = [
    ",".join(kernel_level.COLUMNS),
    "compress_16_requests,copy,bfloat16,32768,4,1,1000,900,1100,64",
    "compress_16_requests,kernel,bfloat16,32768,4,1,2000,1900,2200,64",
    "tail_update,copy,float32,8,4,1,1000,900,1100,64",
    "tail_update,kernel,float32,8,4,1,500,400,600,64",
]


def test_lines_of_the_mojo_program_become_rows():
    compress, copy, decode, _ = kernel_level.parse(MOJO_LINES, COMMAND)
    assert (compress.level, compress.provider, compress.median_us) == (KERNEL, OURS, 2)
    assert (compress.case, compress.requests, compress.next_n) == ("compress", 16, 0)
    assert (copy.provider, copy.median_us, copy.ratio) == ("copy", 1.0, 0.5)
    assert (copy.ratio_p20, copy.ratio_p80) == pytest.approx((900 / 2200, 1100 / 1900))
    assert (decode.case, decode.requests, decode.next_n) == (cases.OPEN, 8, 1)


def test_ratios_of_the_mojo_program_are_taken_over():
    ratios = (",".join(kernel_level.RATIOS), "1,1,1", "2.5,2,4")
    lines = [",".join(pair) for pair in zip(MOJO_LINES, ratios, strict=False)]
    _, copy = kernel_level.parse(lines, COMMAND)
    assert (copy.ratio, copy.ratio_p20, copy.ratio_p80) == (0.4, 0.25, 0.5)


def test_other_columns_or_no_copy_of_the_mojo_program_are_refused():
    with pytest.raises(ValueError, match="columns must be"):
        kernel_level.parse(["case,provider", "compress,kernel"], COMMAND)
    with pytest.raises(ValueError, match="there is no copy beside"):
        kernel_level.parse([MOJO_LINES[0], MOJO_LINES[2]], COMMAND)


@pytest.mark.slow
def test_a_tiny_run_verifies_times_and_writes_its_csv(tmp_path):
    options = ["--quick", "--only", "closing/float32/n8/", "--out", str(tmp_path)]
    names = ["--providers", "kpool_graph,copy,empty,numpy"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *options, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows.read_csv(tmp_path / "cpu.csv")
    assert {(row.level, row.provider) for row in found} == {
        (EXECUTE, OURS),
        (EXECUTE, "copy"),
        (EXECUTE, "empty"),
        (EXECUTE, "numpy"),
        (GRAPH, OURS),
        (GRAPH, "copy"),
        (GRAPH, "empty"),
    }
    assert all(row.status == rows.OK and np.isfinite(row.median_us) for row in found)
    assert "execute: tail_update_closing" in done.stdout
