"""The README's figures, from a run's CSV and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .cases import CLOSING, DECODE, FLOAT32
from .rows import COPY, EMPTY, EXECUTE, GRAPH, KERNEL, OK, OURS, Row

BATCH_FIGURE = "batch.svg"
CONTEXT_FIGURE = "context.svg"

_IN_GRAPH = f"{OURS}, one more op in a graph"
_BARE = f"{OURS}, the kernel alone"
_LABELS = {
    COPY: "a copy of the same bytes",
    EMPTY: "an empty MAX graph",
    "transformers": "transformers, rebuilding every pool",
}
_COLOURS = {
    OURS: "#b3261e",
    _IN_GRAPH: "#e0655c",
    _BARE: "#f0a39d",
    _LABELS[COPY]: "#777777",
    _LABELS[EMPTY]: "#aaaaaa",
    "max ops": "#7b4fa3",
    "numpy": "#2c7fb8",
    "torch": "#d98200",
    "torch.compile": "#8c5a00",
    "jax": "#2e8b57",
    _LABELS["transformers"]: "#2c7fb8",
}
_YARDSTICKS = (_LABELS[COPY], _LABELS[EMPTY])


@dataclass(frozen=True)
class Point:
    """A point of a line.

    Attributes:
        x: Batch or context.
        us: Microseconds.
        low: 20th percentile.
        high: 80th percentile.
    """

    x: int
    us: float
    low: float
    high: float


@dataclass
class Figure:
    """What a figure shows.

    Attributes:
        title: Above it.
        conditions: Below the title.
        x_label: Of its horizontal axis.
        lines: Points by label, in ascending `x`.
    """

    title: str
    conditions: str
    x_label: str
    lines: dict[str, list[Point]] = field(default_factory=dict)


def batch_figure(rows: Sequence[Row]) -> Figure:
    """Gathers the cost of a decode step in which every row closes, by batch.

    Args:
        rows: Of one run.

    Returns:
        The figure's data; no lines if the run has no such rows.
    """
    wanted = [
        row
        for row in rows
        if (row.case, row.dtype, row.kpool, row.next_n, row.threads)
        == (CLOSING, FLOAT32, 4, 1, 1)
    ]
    figure = Figure(
        "One decode step in which every row closes a pool",
        _conditions(wanted),
        "rows in the batch",
    )
    for row in wanted:
        ours_inside = row.provider == OURS and row.level in (GRAPH, KERNEL)
        if row.level == EXECUTE or ours_inside:
            inside = {GRAPH: _IN_GRAPH, KERNEL: _BARE}
            label = inside.get(row.level, _LABELS.get(row.provider, row.provider))
            _add(figure, label, row)
    return _sorted(figure)


def context_figure(rows: Sequence[Row]) -> Figure:
    """Gathers the cost of a decoded token by the tokens before it.

    Args:
        rows: Of one run.

    Returns:
        The figure's data; no lines if the run has no such rows.
    """
    wanted = [row for row in rows if row.case == DECODE]
    figure = Figure(
        "One decoded token of one request, ending a pool",
        _conditions(wanted),
        "tokens of context",
    )
    for row in wanted:
        if row.provider in (OURS, EMPTY, "transformers"):
            _add(figure, _LABELS.get(row.provider, row.provider), row)
    return _sorted(figure)


def _add(figure: Figure, label: str, row: Row) -> None:
    if row.status == OK and row.median_us is not None:
        point = Point(row.n, row.median_us, row.p20_us or 0, row.p80_us or 0)
        figure.lines.setdefault(label, []).append(point)


def _sorted(figure: Figure) -> Figure:
    for points in figure.lines.values():
        points.sort(key=lambda point: point.x)
    return figure


def _conditions(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    row = rows[0]
    threads = "one thread" if row.threads == 1 else f"{row.threads} threads"
    return (
        f"{row.dtype}, head_dim 128, kpool {row.kpool}, {threads}, warm caches; median"
        f" and 20th to 80th percentile\n{row.cpu}\n{row.versions}"
    )


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws both figures.

    Args:
        rows: Of one run.
        folder: Where they go.

    Returns:
        The files, for figures whose rows are there.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figures = {BATCH_FIGURE: batch_figure(rows), CONTEXT_FIGURE: context_figure(rows)}
    return [
        _draw(figure, folder / name) for name, figure in figures.items() if figure.lines
    ]


def _draw(figure: Figure, path: Path) -> Path:
    import matplotlib

    matplotlib.use("svg")
    # Text as text and a fixed salt: the same rows give the same bytes.
    style = {"svg.hashsalt": "kpool_graph", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    with matplotlib.rc_context(style):
        canvas, axes = pyplot.subplots(figsize=(8.6, 5.2))
        canvas.patch.set_facecolor("white")
        for label, points in figure.lines.items():
            _draw_line(axes, label, points)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({point.x for line in figure.lines.values() for point in line})
        axes.set_xticks(sizes, [_short(size) for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: _duration(value))
        axes.set_xlabel(figure.x_label)
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, figure)
        canvas.text(0.02, 0.975, figure.title, fontsize=12, weight="bold", va="top")
        canvas.text(
            0.02, 0.925, figure.conditions, fontsize=7.5, color="#555555", va="top"
        )
        canvas.subplots_adjust(left=0.09, right=0.68, top=0.79, bottom=0.1)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(canvas)
    return path


def _draw_line(axes: object, label: str, points: list[Point]) -> None:
    xs, middles = [point.x for point in points], [point.us for point in points]
    style = "--" if label in _YARDSTICKS else "-"
    colour = _COLOURS.get(label, "#333333")
    width = 2.4 if label == OURS else 1.4
    axes.plot(xs, middles, style, marker="o", markersize=3, color=colour, lw=width)
    lows, highs = [point.low for point in points], [point.high for point in points]
    axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, lw=0)


def _label_ends(axes: object, figure: Figure) -> None:
    """Writes each label beside its line's last point, none over another."""
    low, high = axes.get_ylim()
    least = (high / low) ** (1 / 24)
    right = max(points[-1].x for points in figure.lines.values())
    above = 0.0
    for label, points in sorted(figure.lines.items(), key=lambda item: item[1][-1].us):
        above = max(points[-1].us, above * least)
        axes.annotate(
            label,
            (right if points[-1].x == right else points[-1].x, above),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=_COLOURS.get(label, "#333333"),
            annotation_clip=False,
        )


def _short(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20}M"
    return f"{size >> 10}k" if size >= 1024 and size % 1024 == 0 else str(size)


def _duration(us: float) -> str:
    if us >= 1000:
        return f"{us / 1000:g} ms"
    return f"{us:g} µs"
