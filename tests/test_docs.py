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


def test_doctor_says_of_another_max_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    [console] = re.findall(r"```console\n\$ kpool doctor\n(.*?)```", page, re.DOTALL)
    [other] = re.findall(r"found (\S+)", console)
    monkeypatch.setattr("max.engine.__version__", other)
    # Compiling says nothing about versions.
    monkeypatch.setattr("kpool_graph.doctor._compare_with_reference", lambda _: None)
    assert main(["doctor"]) == 1
    assert console in capsys.readouterr().out
