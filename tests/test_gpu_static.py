"""The GPU kernels keep their design and figures; the gate sees one that does not."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import gate
from benchmarks.gpu.assembly import find_ptxas, read_gcn, read_ptx
from benchmarks.gpu.gate import NO_PTXAS, broken_rules, problems
from benchmarks.gpu.static import (
    ARCHES,
    OURS,
    PEER,
    ROOT,
    Row,
    measure,
    read_table,
    write_table,
)
from kpool_graph._library import registered_ops


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return read_table()


def row_of(table: list[Row], kernel: str, arch: str = "sm_90a") -> Row:
    return next(
        row
        for row in table
        if (row.kernel, row.arch, row.provider) == (kernel, arch, OURS)
    )


def test_table_holds_every_registered_op_and_its_peers(table: list[Row]) -> None:
    registered = {name.rpartition(".")[2] for name in registered_ops()}
    for arch in ARCHES:
        ours, peers = (
            {r.kernel for r in table if (r.arch, r.provider) == (arch, provider)}
            for provider in (OURS, PEER)
        )
        assert {re.sub("_(in|out)$", "", kernel) for kernel in ours} == registered
        assert peers == {"tail_update", "seed_tail", "compress", "expand_topk"}


def test_table_obeys_the_design(table: list[Row]) -> None:
    assert problems(table, table) == []


def test_table_survives_a_round_trip(table: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "static.csv"
    write_table(table, path)
    assert read_table(path) == table


@pytest.mark.parametrize(
    "name, words",
    [
        ("registers", "registers must be at most"),
        ("instructions", "instructions must be at most"),
        ("loads2", "loads2 must be 0, got"),
        ("stores2", "stores2 must be 0, got"),
        ("spills", "spills must be 0, got"),
        ("scratch", "scratch must be 0, got"),
        ("local", "local must be 0, got"),
    ],
)
def test_gate_names_a_figure_that_grew(table: list[Row], name: str, words: str) -> None:
    row = row_of(table, "compress")
    worse = replace(row, **{name: getattr(row, name) + 1})
    faults = problems([worse if r is row else r for r in table], table)
    assert len(faults) == 1
    assert faults[0].startswith(f"{row.name}: {words}")


def test_gate_wants_as_many_wide_loads_as_members(table: list[Row]) -> None:
    row = row_of(table, "compress")
    assert broken_rules(replace(row, loads16=2 * row.kpool)) == []
    (fault,) = broken_rules(replace(row, loads16=2 * row.kpool - 1))
    assert fault.endswith("loads16 must be at least 8, got 7")


def test_gate_misses_a_kernel_that_is_not_measured(table: list[Row]) -> None:
    row = row_of(table, "seed_tail")
    rest = [r for r in table if r is not row]
    assert problems(rest, table) == [f"{row.name}: not emitted"]
    assert problems(table, rest) == [f"{row.name}: not in static.csv"]


def test_gate_says_that_it_has_no_ptxas(
    table: list[Row],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blank = [
        replace(row, registers=None, spills=None, scratch=None)
        if row.arch == "sm_90a"
        else row
        for row in table
    ]
    monkeypatch.setattr(gate, "find_ptxas", lambda: None)
    monkeypatch.setattr(gate, "measure", lambda: blank)
    assert gate.main([]) == 0
    assert capsys.readouterr().err.strip() == gate.NO_PTXAS
    assert gate.main(["--write"]) == 1
    assert read_table() == table


PTX = """
\t.reg .b32 \t%r<3>;
\tld.param::entry.b64 \t%rd1, [entry_param_0];
$L__BB0_1:
\t@%p1 bra \t$L__BB0_2;
\tld.global.nc.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd2];
\tld.global.v2.b16 \t{%rs1, %rs2}, [%rd2];
\tld.global.b16 \t%rs1, [%rd2];
\tst.local.b64 \t[%rd3], %rd4;
\tst.global.v4.b16 \t[%rd3], {%rs1, %rs2, %rs3, %rs4};
"""


def test_ptx_accesses_are_counted_by_width() -> None:
    figures = read_ptx(PTX)
    assert figures["instructions"] == 7
    assert [figures[f"loads{n}"] for n in (16, 8, 4, 2)] == [1, 0, 1, 1]
    assert [figures[f"stores{n}"] for n in (16, 8, 4, 2)] == [0, 1, 0, 0]
    assert figures["local"] == 1


GCN = """
\ts_load_dwordx2 s[0:1], s[0:1], 0x0
\tglobal_load_dwordx4 v[2:5], v[0:1], off
\tflat_load_ushort v2, v[0:1]
\tglobal_store_dwordx3 v[0:1], v[2:4], off
\tscratch_store_dword off, v1, s32
  - .agpr_count:     1
    .private_segment_fixed_size: 8
    .sgpr_count:     20
    .sgpr_spill_count: 2
    .vgpr_count:     30
    .vgpr_spill_count: 4
"""


def test_gfx942_accesses_and_spills_of_both_kinds_are_counted() -> None:
    figures = read_gcn(GCN)
    assert figures["instructions"] == 5
    assert [figures[f"loads{n}"] for n in (16, 8, 4, 2)] == [1, 0, 0, 1]
    assert [figures[f"stores{n}"] for n in (16, 8, 4, 2)] == [0, 1, 1, 0]
    assert (figures["local"], figures["spills"], figures["scratch"]) == (1, 6, 8)
    assert (figures["registers"], figures["scalar_registers"]) == (31, 20)


@pytest.mark.slow
def test_ptxas_is_here_to_count_registers() -> None:
    if not find_ptxas():
        assert not os.environ.get("CI"), NO_PTXAS
        pytest.skip(NO_PTXAS)


@pytest.mark.slow
def test_kernels_keep_their_design_and_their_figures(table: list[Row]) -> None:
    assert problems(measure(), table) == []


# What is changed in kernels/vectors.mojo, for which GPUs that matters, and what the
# gate must say. An access that is not aligned is no worse on gfx942.
MUTATIONS = {
    "one channel a thread": (
        {"VECTOR_BYTES = 16": "VECTOR_BYTES = 2"},
        "gfx942",
        "loads2 must be 0",
    ),
    "no alignment promised": (
        {
            "min(width * size_of[Scalar[dtype]](), VECTOR_BYTES)": (
                "align_of[Scalar[dtype]]()"
            )
        },
        "sm_90a",
        "loads2 must be 0",
    ),
    "more members than registers": (
        {
            "VECTOR_BYTES = 16": "VECTOR_BYTES = 32",
            "_GPU_POOL_REGISTERS = 64": "_GPU_POOL_REGISTERS = 4096",
        },
        "sm_90a gfx942",
        "spills must be 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_gate_fails_on_kernels_with(mutation: str, tmp_path: Path) -> None:
    changes, arches, words = MUTATIONS[mutation]
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    source = tmp_path / "kernels" / "vectors.mojo"
    text = source.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    source.write_text(text)
    if "spills" in words and not find_ptxas():
        arches = "gfx942"
    rows = measure([OURS], arches.split(), root=tmp_path, op="compress")
    for arch in arches.split():
        faults = [f for row in rows if row.arch == arch for f in broken_rules(row)]
        assert any(words in fault for fault in faults), faults
