"""What a trace shows, as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from ._trace_steps import Step, Token, Trace
from ._trace_text import events, headline, title, verdict

_LEFT, _TOP, _ROW, _GAP = 20, 34, 40, 30
_CELL, _PITCH = 40, 44
_CHARACTER = 7.2
_BESIDE = 24

_STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2937 }
    .name { font-weight: 600 }
    .note { font-size: 12px; fill: #4b5563 }
    .cell { text-anchor: middle }
    .wrong { fill: #b91c1c }
    rect { stroke-width: 1.5 }
    rect.page { fill: #ffffff; stroke: #d0d7de; stroke-width: 1 }
    rect.live { fill: #dbeafe; stroke: #2563eb }
    rect.stale { fill: #f3f4f6; stroke: #9ca3af }
    rect.rejected { fill: #ffedd5; stroke: #c2410c; stroke-dasharray: 4 3 }
    rect.lost { fill: #fee2e2; stroke: #b91c1c; stroke-width: 2.5 }
    rect.empty { fill: #ffffff; stroke: #d1d5db; stroke-dasharray: 2 3 }
"""
_LEGEND = (
    ("live", "needed by the next step"),
    ("stale", "no longer needed"),
    ("rejected", "a rejected token"),
    ("lost", "a rejected token over one that was needed"),
)


def draw(traces: Sequence[Trace]) -> str:
    """Draws what happened on each ring: a row of cells a step.

    Args:
        traces: The same steps on one ring each.

    Returns:
        An SVG document.
    """
    steps_x = _LEFT + 64
    cells_x = steps_x + _text_width(
        max((_tokens(step) for each in traces for step in each.steps), key=len)
    )
    notes_x = cells_x + max(each.ring_len for each in traces) * _PITCH + _BESIDE
    notes = [
        note for each in traces for step in each.steps for note in [_note(step)] if note
    ]
    legend_x = _LEFT + sum(_text_width(words) + 28 for _, words in _LEGEND)
    heading = headline(traces[0])
    width = max(
        legend_x,
        _LEFT + _text_width(heading),
        notes_x + max(map(_text_width, notes), default=0),
    )
    shapes = [_text(_LEFT, _TOP, heading, "name")]
    y = _TOP + _GAP
    for each in traces:
        shapes.append(_text(_LEFT, y + 14, title(each), "name"))
        y += _GAP
        for entry in range(each.ring_len):
            middle = cells_x + entry * _PITCH + _CELL / 2
            shapes.append(_text(middle, y + 8, str(entry), "note cell"))
        y += 16
        for number, step in enumerate(each.steps, 1):
            shapes.append(_text(_LEFT, y + 24, f"step {number}", "note"))
            shapes.append(_text(steps_x, y + 24, _tokens(step), ""))
            for entry, token in enumerate(step.entries):
                shapes += _cell(cells_x + entry * _PITCH, y, token, _kind(step, entry))
            if note := _note(step):
                wrong = step.lost or any(pool.strays for pool in step.closed)
                kind = "wrong" if wrong else "note"
                shapes.append(_text(notes_x, y + 24, note, kind))
            y += _ROW + 4
        shapes.append(_text(_LEFT, y + 16, verdict(each), ""))
        y += _GAP + 12
    shapes += _legend(y)
    return _document(width + _LEFT, y + 40, heading, shapes)


def _tokens(step: Step) -> str:
    return " ".join(str(write.token) for write in step.writes)


def _note(step: Step) -> str:
    return "; ".join(events(step))


def _kind(step: Step, entry: int) -> str:
    token = step.entries[entry]
    if token is None:
        return "empty"
    if token.rejected:
        return "lost" if entry in {write.entry for write in step.lost} else "rejected"
    return "live" if token.position in step.live else "stale"


def _text_width(words: str) -> float:
    return len(words) * _CHARACTER + _BESIDE


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def _cell(x: float, y: float, token: Token | None, kind: str) -> list[str]:
    box = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{_CELL}"'
    return [
        f'{box} height="{_CELL - 4}" rx="5"/>',
        _text(x + _CELL / 2, y + 23, str(token or ""), "cell"),
    ]


def _legend(y: float) -> list[str]:
    shapes, x = [], float(_LEFT)
    for kind, words in _LEGEND:
        shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="18" height="18" rx="4"/>'
        )
        shapes.append(_text(x + 26, y + 14, words, "note"))
        x += _text_width(words) + 28
    return shapes


def _document(width: float, height: float, label: str, shapes: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}"'
            f' height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
            f' aria-label="{escape(label)}">',
            f"  <style>{_STYLE}  </style>",
            f'  <rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}"'
            f' height="{height - 1:.0f}" rx="8"/>',
            *(f"  {shape}" for shape in shapes),
            "</svg>\n",
        ]
    )
