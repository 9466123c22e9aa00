"""What the documents show is what happens, errors included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", ["serving.md"])
def test_the_snippets_run_and_fail_as_shown(page: str) -> None:
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
    assert errors >= 15
