"""Charts as inline SVG, drawn by matplotlib: text stays text, and ink follows the page's colour."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "canvas", "draw", "to_svg"]

PALETTE = ("#3b82c4", "#d9822b", "#3d9a5f", "#c4473b", "#8a63b8", "#8d6e54", "#c75f9b", "#7a828c")

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kfp-elastic",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.grid": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}
_INK = re.compile(r"(?<=[:\"\s])#000000(?=[;\"])")
_ROOT_NOISE = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def draw(painter: Callable[[Axes], None], *, width: float = 7.5, height: float = 2.6) -> str:
    """Return the SVG of one set of axes that `painter` draws on. Sizes in inches."""
    with canvas(width=width, height=height) as (figure, (axes,)):
        painter(axes)
        return to_svg(figure)


@contextmanager
def canvas(
    *, width: float = 7.5, height: float = 2.6, rows: int = 1, columns: int = 1, share_x: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its axes (row by row) in the report's style, without a global matplotlib state."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=PALETTE)}):
        figure = NewFigure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
        yield figure, [axes for row in grid for axes in row]


def to_svg(figure: Figure) -> str:
    """Return `figure` as an SVG element to put inline: the same figure gives the same bytes."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = _ROOT_NOISE.sub("", svg[svg.index("<svg") :])
    svg = _INK.sub("currentColor", svg)
    # Text without a fill of its own would stay black on a dark page.
    return svg.replace("<svg ", '<svg fill="currentColor" role="img" ', 1)
