"""`kpool doctor`: silent about nothing that is off, and it says what to do."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from kpool_graph import _library, _versions, doctor
from kpool_graph._library import SOURCE_VARIABLE, source_dir
from kpool_graph.cli import main

OPS = ("mo.mla.kpool.seed_tail", "mo.mla.kpool.tail_update")
INSTALL = f"pip install max=={_versions.MAX_VERSION}"


@pytest.fixture
def no_self_check(monkeypatch):
    """Spares tests of other checks the compile."""
    monkeypatch.setattr(doctor, "_compare_with_reference", lambda device: None)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the kernels that the package takes for its own."""
    copy = tmp_path / "kernels"
    shutil.copytree(source_dir(), copy)
    monkeypatch.setenv(SOURCE_VARIABLE, str(copy))
    return copy


def problems(report: str) -> list[str]:
    return re.findall(r"^problem  (.+?):", report, re.MULTILINE)


def test_a_healthy_installation_passes_and_names_every_op(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert problems(report) == []
    line = next(line for line in report.splitlines() if line.startswith("ok       ops"))
    assert all(op in line for op in OPS)
    for version in (_versions.__version__, _versions.MAX_VERSION):
        assert version in report
    assert f"Mojo {_versions.MOJO_VERSION}" in report
    assert "both ops agree with NumPy on cpu" in report


def test_another_max_version_is_named_with_the_one_to_install(
    monkeypatch, capsys, no_self_check
):
    monkeypatch.setattr("max.engine.__version__", "26.6.0")
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["MAX"]
    assert "found 26.6.0" in report and INSTALL in report


def test_a_max_that_cannot_be_imported_is_a_line_of_the_report(
    monkeypatch, capsys, no_self_check
):
    monkeypatch.setitem(sys.modules, "max.engine", None)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "MAX" in problems(report) and INSTALL in report


def test_another_mojo_version_is_named_with_what_brings_the_right_one(
    monkeypatch, capsys, no_self_check
):
    library = _library.kernels_path()
    monkeypatch.setattr(_library, "kernels_path", lambda: library)
    monkeypatch.setattr(_library, "mojo_version", lambda: "Mojo 1.2.01 (abc)")
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["Mojo"]
    assert "1.2.01" in report and INSTALL in report


def test_a_missing_compiler_is_reported_once_and_the_rest_still_checked(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MODULAR_MOJO_MAX_DRIVER_PATH", str(tmp_path / "mojo"))
    _library.mojo_version.cache_clear()
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["Mojo"]
    assert "no Mojo compiler" in report and INSTALL in report
    assert f"kernel sources: {source_dir()}" in report
    assert "skipped  self-check" in report


def test_missing_kernels_are_reported_with_the_variable_that_hides_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path))
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["kernel sources"]
    assert str(tmp_path) in report
    assert f"if {SOURCE_VARIABLE} is set, unset it" in report
    assert "ok       Mojo" in report


def test_several_problems_are_all_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("max.engine.__version__", "26.6.0")
    assert main(["doctor"]) == 1
    assert problems(capsys.readouterr().out) == ["MAX", "kernel sources"]


def test_kernels_that_do_not_compile_are_reported_with_the_compilers_words(
    kernels, capsys
):
    with (kernels / "ring_ops.mojo").open("a", encoding="utf-8") as sources:
        sources.write("def broken(\n")
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["compiled kernels"]
    assert "do not compile" in report and "ring_ops.mojo" in report


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_the_kernels_do_not_register_is_named(
    op, kernels, monkeypatch, capsys, no_self_check
):
    line = f'@extensibility.register("{op}")\n'
    [(path, source)] = (
        (path, source)
        for path in kernels.glob("*.mojo")
        if line in (source := path.read_text(encoding="utf-8"))
    )
    path.write_text(source.replace(line, ""), encoding="utf-8")
    library = _library.kernels_path()
    # The sources promise what the compiled file lacks.
    monkeypatch.delenv(SOURCE_VARIABLE)
    monkeypatch.setattr(_library, "kernels_path", lambda: library)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["ops"]
    assert f"not registered: {op}\n" in report
    assert "reinstall kpool_graph" in report


def test_kernels_that_register_no_op_are_a_problem(kernels, capsys, no_self_check):
    for path in kernels.glob("*_ops.mojo"):
        path.write_text('"""Nothing."""\n', encoding="utf-8")
    assert main(["doctor"]) == 1
    assert "ops" in problems(capsys.readouterr().out)


def test_wrong_results_are_reported(monkeypatch, capsys):
    def halve(*arguments):
        return pool(*arguments) / 2

    pool = doctor.reference.pool
    monkeypatch.setattr(doctor.reference, "pool", halve)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert problems(report) == ["self-check"]
    assert "a pooled key is wrong" in report and "report it" in report


def test_the_version_is_printed_with_the_max_it_is_for(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    report = capsys.readouterr().out
    assert _versions.__version__ in report and _versions.MAX_VERSION in report
