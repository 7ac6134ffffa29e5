"""Charts of an evaluation, as inline SVG. Shapes are few on purpose: a report must stay light to open."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray
from elastic_runtime.evaluation.calibration import Reliability
from elastic_runtime.evaluation.roc import RocCurve
from elastic_runtime.report import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from elastic_runtime.evaluation.result import Slices

__all__ = [
    "confusion",
    "predicted_against_true",
    "reliability_chart",
    "residuals",
    "roc",
    "slice_chart",
]

_POINTS = 1500
_BLUE, _ORANGE, _GREEN, _RED = charts.PALETTE[:4]
_GREY = charts.PALETTE[7]

_Parameters = ParamSpec("_Parameters")


@contextmanager
def _quiet_about_glyphs() -> Iterator[None]:
    # Text stays text in the SVG, so the reader's fonts draw it; ours only measure it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def _chart(function: Callable[_Parameters, str]) -> Callable[_Parameters, str]:
    def drawn(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> str:
        with _quiet_about_glyphs():
            return function(*args, **kwargs)

    drawn.__doc__ = function.__doc__
    return drawn


@_chart
def confusion(matrix: IntArray, classes: Sequence[str]) -> str:
    """Draw the confusion matrix (classes, classes), shaded by the share of the true class."""
    from matplotlib.colors import to_rgba

    count = len(classes)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = min(7.5, 1.6 + 0.42 * count + 0.05 * max(len(_short(label)) for label in classes))
    with charts.canvas(width=size + 0.4, height=size) as (figure, (axes,)):
        # Shades of one ink over the page's own colour, so that they read on light and dark pages.
        shades = np.empty((count, count, 4))
        shades[:] = to_rgba(_BLUE)
        shades[~np.eye(count, dtype=bool)] = to_rgba(_RED)
        shades[..., 3] = np.where(matrix > 0, 0.08 + 0.62 * share, 0.0)
        edges = np.arange(count + 1) - 0.5
        axes.pcolormesh(edges, edges, shades, edgecolor=_GREY, linewidth=0.3)
        font = 9 if count <= 12 else 6.5 if count <= 20 else 5
        for true, predicted in zip(*np.nonzero(matrix), strict=True):
            text = f"{matrix[true, predicted]:,}"
            axes.text(predicted, true, text, ha="center", va="center", fontsize=font, color="#000000")
        _class_ticks(axes, classes)
        axes.set(xlabel="predicted class", ylabel="true class", aspect="equal")
        axes.invert_yaxis()
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0)
        return charts.to_svg(figure)


@_chart
def roc(curves: Sequence[RocCurve]) -> str:
    """Draw ROC curves, the main one strongest."""

    def paint(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8, linestyle=":")
        for i, curve in enumerate(curves):
            (line,) = axes.plot(
                curve.false_positive_rate,
                curve.true_positive_rate,
                linewidth=2.0 if i == 0 else 1.2,
                linestyle="-" if i == 0 else "--",
                color=charts.PALETTE[i],
            )
            line.set_label(f"{_short(curve.name)} (AUC {curve.auc:.4f})")
        axes.set(
            xlabel="false positive rate",
            ylabel="true positive rate",
            xlim=(-0.02, 1.02),
            ylim=(-0.02, 1.02),
        )
        _plain_legend(axes, loc="lower right")

    return charts.draw(paint, width=6.2, height=3.8)


@_chart
def reliability_chart(found: Reliability) -> str:
    """Draw the reliability curve over a histogram of the confidences."""
    with charts.canvas(width=6.2, height=4.2, rows=2, share_x=True) as (figure, (upper, lower)):
        width = found.edges_high - found.edges_low
        middle = (found.edges_high + found.edges_low) / 2
        upper.bar(middle, found.accuracy, width=width * 0.92, color=_BLUE, alpha=0.45, label="share right")
        # No line through the points: bins of few rows would draw a zigzag that means nothing.
        upper.scatter(found.confidence, found.accuracy, color=_BLUE, s=14, zorder=3, clip_on=False)
        upper.plot([0, 1], [0, 1], color=_GREY, linestyle=":", linewidth=1, label="perfectly calibrated")
        upper.set(ylabel="share right", ylim=(0, 1.03), xlim=(0, 1))
        _plain_legend(upper, loc="upper left")
        lower.bar(middle, found.rows, width=width * 0.92, color=_GREY, alpha=0.6)
        lower.set(xlabel="confidence (probability of the predicted class)", ylabel="rows")
        return charts.to_svg(figure)


@_chart
def predicted_against_true(target: FloatArray, predicted: FloatArray, name: str) -> str:
    """Draw predicted against true values, at most 1500 rows evenly picked."""
    kept = _sample(len(target))

    def paint(axes: Axes) -> None:
        low = float(min(target.min(), predicted.min()))
        high = float(max(target.max(), predicted.max()))
        axes.plot([low, high], [low, high], color=_GREY, linewidth=1, linestyle=":")
        axes.scatter(target[kept], predicted[kept], s=9, color=_BLUE, alpha=0.45, linewidths=0)
        axes.set_xlabel(f"true {_short(name, 30)}", parse_math=False)
        axes.set_ylabel(f"predicted {_short(name, 30)}", parse_math=False)

    return charts.draw(paint, width=6.2, height=3.8)


@_chart
def residuals(predicted: FloatArray, residual: FloatArray) -> str:
    """Draw residuals over the prediction, and their distribution."""
    kept = _sample(len(predicted))
    with charts.canvas(width=7.5, height=2.8, columns=2) as (figure, (left, right)):
        left.axhline(0, color=_GREY, linewidth=1, linestyle=":")
        left.scatter(predicted[kept], residual[kept], s=9, color=_BLUE, alpha=0.45, linewidths=0)
        left.set(xlabel="prediction", ylabel="residual")
        right.hist(residual, bins=min(40, max(5, int(np.sqrt(len(residual))))), color=_BLUE, alpha=0.6)
        right.axvline(0, color=_GREY, linewidth=1, linestyle=":")
        right.set(xlabel="residual", ylabel="rows")
        return charts.to_svg(figure)


@_chart
def slice_chart(slices: Slices) -> str:
    """Draw the metric of each slice with its interval; small slices are pale, the worst one is marked."""
    rows = slices.rows

    def paint(axes: Axes) -> None:
        for place, row in enumerate(rows):
            found = row.metrics[slices.metric]
            color = _GREY if row.small else _RED if row.label == slices.worst else _BLUE
            if found.low is not None and found.high is not None:
                axes.plot([found.low, found.high], [place, place], color=color, linewidth=2, alpha=0.6)
            axes.plot([found.value], [place], marker="o", markersize=5, color=color)
        axes.set_yticks(range(len(rows)), [_short(row.label, 28) for row in rows])
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(slices.metric)
        axes.grid(axis="x", color=_GREY, alpha=0.25)

    return charts.draw(paint, width=7.2, height=0.9 + 0.27 * len(rows))


def _sample(rows: int) -> IntArray:
    return np.unique(np.linspace(0, rows - 1, min(rows, _POINTS)).astype(np.int64))


def _short(label: str, length: int = 14) -> str:
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in label)
    return printable if len(printable) <= length else printable[: length - 1] + "…"


def _class_ticks(axes: Axes, classes: Sequence[str]) -> None:
    labels = [_short(label) for label in classes]
    places = range(len(labels))
    font = 9 if len(labels) <= 12 else 7
    longest = max(map(len, labels))
    upright = longest > 3 and longest * len(labels) > 24
    axes.set_xticks(places, labels, rotation=90 if upright else 0, fontsize=font)
    axes.set_yticks(places, labels, fontsize=font)
    for label in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
        # A "$" in a label is a dollar, not the start of a formula.
        label.set_parse_math(False)


def _plain_legend(axes: Axes, **options: Any) -> None:
    legend = axes.legend(**options)
    for text in legend.get_texts():
        text.set_parse_math(False)
