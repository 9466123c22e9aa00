"""Draws ring.svg: the tokens of one request, their pools, and the ring.

Run `python docs/figures/ring.py` to rewrite the picture beside this file.
"""

from __future__ import annotations

from pathlib import Path

KPOOL = 4
RING_LEN = 6
NEXT = 11
CLOSING = NEXT // KPOOL
LIVE = range(CLOSING * KPOOL, NEXT)

WIDTH, HEIGHT = 760, 424
PITCH, CELL = 50, 42
LEFT = 150
POOLED_Y, TOKEN_Y, KEY_Y, GATE_Y, LEGEND_Y = 28, 132, 250, 298, 400
# The ring stands under the newest tokens, so that each arrow falls straight.
RING_COLUMN = LIVE.start - LIVE.start % RING_LEN

STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2937 }
    .name { font-weight: 600 }
    .note { font-size: 12px; fill: #4b5563 }
    .cell { text-anchor: middle }
    .right { text-anchor: end }
    rect, path { stroke-width: 1.5 }
    path { fill: none; stroke: #64748b }
    rect.page { fill: #ffffff; stroke: #d0d7de; stroke-width: 1 }
    rect.done { fill: #f8fafc; stroke: #64748b }
    rect.key { fill: #dcfce7; stroke: #15803d }
    rect.live { fill: #dbeafe; stroke: #2563eb }
    rect.next { fill: #ffedd5; stroke: #c2410c; stroke-dasharray: 4 3 }
    rect.stale { fill: #f3f4f6; stroke: #9ca3af }
    text.stale { fill: #6b7280 }
    path.next { stroke: #c2410c; stroke-dasharray: 4 3 }
    path.live { stroke: #2563eb }
"""


def column_x(column: int) -> int:
    """Returns the left edge of a column of cells, in pixels."""
    return LEFT + column * PITCH


def text(x: float, y: float, words: str, kind: str = "note") -> str:
    """Draws one line of text, `y` on its baseline."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def cell(x: float, y: float, words: str, kind: str, width: float = CELL) -> list[str]:
    """Draws a box of one cell's height with words in its middle."""
    return [
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}"'
        f' height="{CELL}" rx="5"/>',
        text(x + width / 2, y + CELL / 2 + 4.5, words, f"cell {kind}"),
    ]


def arrow(x: float, start: float, end: float, kind: str) -> str:
    """Draws a vertical arrow, its tip at `end`."""
    back = 6 if start > end else -6
    return (
        f'<path class="{kind}" d="M{x:g} {start:g}V{end:g}"/>'
        f'<path class="{kind}" style="stroke-dasharray:none"'
        f' d="M{x - 4:g} {end + back:g}L{x:g} {end:g}L{x + 4:g} {end + back:g}"/>'
    )


def draw_pools() -> list[str]:
    """Draws the pooled keys and what each is made of."""
    shapes = [
        text(18, POOLED_Y + 16, "pooled keys", "name"),
        text(18, POOLED_Y + 33, f"one per {KPOOL} tokens"),
    ]
    for pool in range(CLOSING + 1):
        kind = "key" if pool < CLOSING else "next"
        stroke = "done" if pool < CLOSING else "next"
        left = column_x(pool * KPOOL)
        width = (KPOOL - 1) * PITCH + CELL
        middle, bracket = left + width / 2, TOKEN_Y - 12
        words = f"pool {pool}" if pool < CLOSING else f"pool {pool}, when {NEXT} comes"
        shapes += cell(left, POOLED_Y, words, kind, width)
        shapes += [
            f'<path class="{stroke}" d="M{left} {TOKEN_Y - 5}V{bracket}'
            f'H{left + width}V{TOKEN_Y - 5}"/>',
            arrow(middle, bracket, POOLED_Y + CELL + 6, stroke),
        ]
    label_x = column_x(2) + 4
    return [
        *shapes,
        text(label_x, TOKEN_Y - 37, "softmax of gate + ape"),
        text(label_x, TOKEN_Y - 21, "weighs the keys"),
    ]


def draw_tokens() -> list[str]:
    """Draws one request's tokens, up to the one that comes next."""
    shapes = [
        text(18, TOKEN_Y + 16, "tokens", "name"),
        text(18, TOKEN_Y + 33, "of one request"),
    ]
    for position in range(NEXT + 1):
        kind = token_kind(position)
        shapes += cell(column_x(position), TOKEN_Y, str(position), kind)
        if kind != "done":
            middle = column_x(position) + CELL / 2
            shapes.append(arrow(middle, TOKEN_Y + CELL + 6, KEY_Y - 6, kind))
    return shapes


def token_kind(position: int) -> str:
    """Tells whether a token's pool is done, or it is live, or comes next."""
    if position in LIVE:
        return "live"
    return "next" if position == NEXT else "done"


def draw_ring() -> list[str]:
    """Draws the request's slot: what each entry holds before `NEXT` comes."""
    shapes = [
        text(18, KEY_Y + 2, "ring", "name"),
        text(18, KEY_Y + 22, "The request's slot of the tail buffer:"),
        text(18, KEY_Y + 39, f"ring_len = {RING_LEN} entries of one key and one gate"),
        text(18, KEY_Y + 56, "score. Position p is in entry p % ring_len."),
        text(
            18,
            KEY_Y + 82,
            f"Token {NEXT} goes to {NEXT} % {RING_LEN} = {NEXT % RING_LEN}",
        ),
        text(18, KEY_Y + 99, f"and closes pool {CLOSING}."),
    ]
    label_x = column_x(RING_COLUMN) - 10
    shapes += [
        text(label_x, KEY_Y + 26, "keys", "note right"),
        text(label_x, GATE_Y + 26, "gate scores", "note right"),
        text(label_x, GATE_Y + CELL + 19, "entry", "note right"),
    ]
    newest = {position % RING_LEN: position for position in range(NEXT + 1)}
    for entry, position in newest.items():
        x = column_x(RING_COLUMN + entry)
        kind = token_kind(position)
        kind = "stale" if kind == "done" else kind
        shapes += cell(x, KEY_Y, f"k{position}", kind)
        shapes += cell(x, GATE_Y, f"g{position}", kind)
        shapes.append(text(x + CELL / 2, GATE_Y + CELL + 19, str(entry), "note cell"))
    return shapes


def draw_legend() -> list[str]:
    """Draws what the colours of the ring's entries mean."""
    meanings = (
        (18, "live", "live: members of the open pool"),
        (274, "next", f"next: taken by token {NEXT}"),
        (498, "stale", "stale: never read again"),
    )
    shapes = []
    for x, kind, meaning in meanings:
        shapes += [
            f'<rect class="{kind}" x="{x}" y="{LEGEND_Y - 11}" width="14"'
            ' height="14" rx="3"/>',
            text(x + 22, LEGEND_Y, meaning),
        ]
    return shapes


def draw() -> str:
    """Draws the whole picture.

    Returns:
        An SVG document.
    """
    shapes = [
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}"'
        f' height="{HEIGHT - 1}" rx="8"/>',
        *draw_pools(),
        *draw_tokens(),
        *draw_ring(),
        *draw_legend(),
    ]
    body = "\n".join(f"  {shape}" for shape in shapes)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"
     viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
  <title>Tokens, pools and the ring</title>
  <style>{STYLE}  </style>
{body}
</svg>
"""


def main() -> None:
    """Rewrites ring.svg beside this file."""
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
