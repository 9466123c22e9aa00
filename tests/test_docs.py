"""What the documents show is what happens, errors included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kpool_graph.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def snippets(page: str) -> list[tuple[str, str | None]]:
    """Lists a page's Python blocks, each with the error that follows it, if any."""
    listed: list[tuple[str, str | None]] = []
    for language, text in BLOCK.findall((DOCS / page).read_text()):
        if language == "python":
            listed.append((text, None))
        else:
            code, error = listed.pop()
            assert error is None, "an error belongs to the block before it"
            listed.append((code, " ".join(text.split())))
    return listed


@pytest.mark.parametrize(
    ("page", "at_least"), [("serving.md", 15), ("troubleshooting.md", 8)]
)
def test_the_snippets_run_and_fail_as_shown(page: str, at_least: int) -> None:
    scope: dict[str, object] = {}
    errors = 0
    for number, (code, error) in enumerate(snippets(page)):
        block = compile(code, f"{page}, block {number}", "exec")
        if error is None:
            exec(block, scope)
            continue
        kind, text = error.split(": ", 1)
        with pytest.raises(Exception) as raised:
            exec(block, scope)
        assert kind in {each.__name__ for each in type(raised.value).__mro__}
        assert text in " ".join(str(raised.value).split()), code
        errors += 1
    assert errors >= at_least


@pytest.fixture
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling says nothing about versions and tools."""
    monkeypatch.setattr("kpool_graph.doctor._compare_with_reference", lambda _: None)


def shown_report(of: str) -> str:
    """What the page says that `kpool doctor` prints, of one thing."""
    page = (DOCS / "troubleshooting.md").read_text()
    reports = re.findall(r"```console\n\$ kpool doctor\n(.*?)```", page, re.DOTALL)
    [report] = [report for report in reports if f" {of}: " in report]
    return report


@pytest.mark.usefixtures("no_self_check")
def test_doctor_says_of_another_max_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_report("MAX")
    [other] = re.findall(r"found (\S+)", shown)
    monkeypatch.setattr("max.engine.__version__", other)
    assert main(["doctor"]) == 1
    assert shown in capsys.readouterr().out


@pytest.mark.usefixtures("no_self_check")
def test_doctor_says_without_a_c_compiler_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where Mojo, which is asked for its version before, is found without PATH.
    monkeypatch.setattr("kpool_graph.doctor.shutil.which", lambda _: None)
    assert main(["doctor"]) == 0
    assert shown_report("C compiler") in capsys.readouterr().out
