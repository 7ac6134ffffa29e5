"""The data report: one HTML page that says what is in the dataset and what is wrong with the source."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from elastic_runtime.preprocessing.profile import MAX_HISTOGRAMS, DataProfile, Histogram
from elastic_runtime.preprocessing.run import QUARANTINE_NAME, PreprocessResult
from elastic_runtime.report import Page
from elastic_runtime.report.charts import PALETTE, canvas, draw, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["render_report"]

_MAX_ROWS: Final = 200
_MAX_CLASSES: Final = 40


def render_report(result: PreprocessResult) -> str:
    """Return the data report of `result` as one HTML document; the same result gives the same text."""
    manifest, profile = result.manifest, result.profile
    quarantined = manifest.source.rows_quarantined
    concerns = quarantined or profile.warnings or profile.conflicting_rows
    # A constant feature is worth a line, not a warning.
    fine = "nothing to mend" if profile.constant_features else "no findings"
    page = Page(
        f"Data report: {manifest.name}",
        f"{manifest.task} of “{manifest.target}” ({profile.task_reason}), split with seed {manifest.seed}",
        status="warn" if concerns else "good",
        status_text="look at the findings" if concerns else fine,
    )
    kept = sum(split.rows for split in manifest.splits.values())
    page.key_figure("rows kept", kept, f"of {manifest.source.rows:,} in the source")
    page.key_figure("quarantined", quarantined, f"{quarantined / manifest.source.rows:.2%} of the rows")
    page.key_figure("features", len(manifest.features), f"{len(profile.constant_features)} constant")
    if manifest.classes is not None:
        page.key_figure("classes", len(manifest.classes))
    _splits(page, result)
    _findings(page, result)
    with warnings.catch_warnings():
        # Text stays text in the page, so that the reader's fonts draw what matplotlib's own cannot.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        _target(page, result)
        _features(page, result)
    _columns(page, result)
    page.section("Source")
    source = manifest.source
    page.table(
        ["what", "value"],
        [["source", source.url], ["sha256", source.sha256], *(["note", note] for note in profile.notes)],
    )
    return page.render()


def _splits(page: Page, result: PreprocessResult) -> None:
    splits = result.manifest.splits
    kept = sum(split.rows for split in splits.values())
    page.section("Splits")
    page.text(
        "Rows are split by a hash of their content, so the order of the source does not matter, and rows "
        "with equal features are always in the same split."
        + (" Each class is divided by the same shares." if result.manifest.classes is not None else "")
    )
    page.table(
        ["split", "rows", "share", "shards", "bytes"],
        [
            [
                name,
                split.rows,
                f"{split.rows / kept:.1%}",
                len(split.shards),
                sum(s.bytes for s in split.shards),
            ]
            for name, split in splits.items()
        ],
    )


def _findings(page: Page, result: PreprocessResult) -> None:
    profile, source = result.profile, result.manifest.source
    page.section("Findings")
    for warning in profile.warnings:
        page.text(f"⚠ {warning}")
    if profile.problems:
        page.table(
            ["column", "rule", "rows", "first rows"],
            [
                [
                    problem.column or "(whole row)",
                    problem.rule,
                    problem.rows,
                    _first(problem.examples, problem.rows),
                ]
                for problem in profile.problems
            ],
            caption=f"{source.rows_quarantined:,} rows were left out; they are in {QUARANTINE_NAME}.",
        )
    if profile.conflicting_rows:
        page.text(
            f"⚠ {profile.conflicting_rows:,} rows have the features of another row with a different target: "
            "no model can be right on all of them. Rows of the source: "
            f"{_first(profile.conflict_examples, profile.conflicting_rows)}."
        )
    if profile.constant_features:
        names = _first(profile.constant_features, len(profile.constant_features))
        page.text(
            f"Constant over the training split, so that they tell the model nothing "
            f"({len(profile.constant_features)}): {names}."
        )
    if not (profile.problems or profile.warnings or profile.conflicting_rows or profile.constant_features):
        page.text(
            "Every row keeps every rule; no constant feature, no equal features with different targets."
        )


def _first(names: Sequence[str], total: int) -> str:
    return ", ".join(names[:10]) + (f" and {total - 10:,} more" if total > 10 else "")


def _target(page: Page, result: PreprocessResult) -> None:
    manifest, profile = result.manifest, result.profile
    if manifest.classes is None:
        page.section(f"Target “{manifest.target}”")
        assert profile.target_histogram is not None
        histogram = profile.target_histogram
        page.figure(draw(lambda axes: _draw_histogram(axes, histogram, legend=True)), _HISTOGRAM_CAPTION)
        return
    page.section("Class balance")
    counts = np.array(list(profile.class_counts.values()))
    totals = counts.sum(axis=0)
    shown = min(len(manifest.classes), _MAX_CLASSES)
    order = np.argsort(-totals, kind="stable")[:shown] if shown < len(manifest.classes) else np.arange(shown)

    def paint(axes: Axes) -> None:
        base = np.zeros(shown)
        for split, row, colour in zip(profile.class_counts, counts, PALETTE, strict=False):
            axes.bar(np.arange(shown), row[order], bottom=base, color=colour, width=0.7, label=split)
            base += row[order]
        axes.set_xticks(np.arange(shown), [_short(manifest.classes[i]) for i in order])  # type: ignore[index]
        if shown > 12:
            axes.tick_params(axis="x", rotation=90)
        axes.set_ylabel("rows")
        axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))

    caption = (
        f"The {shown} largest of {len(manifest.classes)} classes." if shown < len(manifest.classes) else ""
    )
    page.figure(draw(paint), caption)
    page.table(
        ["class", *profile.class_counts, "all", "share"],
        [
            [manifest.classes[i], *map(int, counts[:, i]), int(totals[i]), f"{totals[i] / totals.sum():.1%}"]
            for i in order
        ],
    )


_HISTOGRAM_CAPTION: Final = "Share of the rows: filled is train, lines are validation and test."


def _features(page: Page, result: PreprocessResult) -> None:
    manifest, profile = result.manifest, result.profile
    page.section("Distributions")
    if len(manifest.features) > MAX_HISTOGRAMS:
        page.figure(draw(lambda axes: _draw_spread(axes, profile)), _SPREAD_CAPTION)
        page.text(
            f"Of {len(manifest.features)} features, the {len(profile.histograms)} most associated with "
            "the target are drawn below, in model order; the table of columns has all."
        )
    if profile.histograms:
        count = len(profile.histograms)
        columns = min(4, count)
        rows = -(-count // columns)
        with canvas(width=7.5, height=1.5 * rows + 0.6, rows=rows, columns=columns) as (figure, axes):
            for axis, histogram in zip(axes, profile.histograms, strict=False):
                _draw_histogram(axis, histogram, title=_short(histogram.name, 24))
                axis.set_yticks([])
            for axis in axes[count:]:
                axis.set_visible(False)
            handles, labels = max((axis.get_legend_handles_labels() for axis in axes[:count]), key=_labelled)
            figure.legend(handles, labels, ncols=3, loc="outside upper right", fontsize=8)
            page.figure(to_svg(figure), _HISTOGRAM_CAPTION + " Values before normalisation.")


def _labelled(pair: tuple[list[Any], list[Any]]) -> int:
    return len(pair[1])


_SPREAD_CAPTION: Final = (
    "All features in model order, in standard deviations from the mean of the training split: the line is "
    "the median, the dark band holds 90 % of the rows, the light band all (cut at ±6)."
)


def _draw_spread(axes: Axes, profile: DataProfile) -> None:
    spread = np.clip(np.array(profile.spread), -6, 6)
    x = np.arange(len(spread))
    axes.fill_between(x, spread[:, 0], spread[:, 4], step="mid", color=PALETTE[0], alpha=0.18, linewidth=0)
    axes.fill_between(x, spread[:, 1], spread[:, 3], step="mid", color=PALETTE[0], alpha=0.45, linewidth=0)
    axes.step(x, spread[:, 2], where="mid", color=PALETTE[1], linewidth=1.2)
    axes.set_xlim(-0.5, len(spread) - 0.5)
    axes.set_xlabel("feature number")
    axes.set_ylabel("standard deviations")


def _draw_histogram(axes: Axes, histogram: Histogram, *, title: str = "", legend: bool = False) -> None:
    edges = np.array(histogram.edges)
    for (split, shares), colour in zip(histogram.shares.items(), PALETTE, strict=False):
        if not any(shares):
            continue
        filled = split == "train"
        look: dict[str, Any] = {"alpha": 0.45, "fill": True} if filled else {"linewidth": 1.0}
        axes.stairs(shares, edges, color=colour, label=split, **look)
    axes.set_ylim(bottom=0)
    if title:
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.locator_params(axis="x", nbins=3)
    if legend:
        axes.set_ylabel("share of rows")
        axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def _columns(page: Page, result: PreprocessResult) -> None:
    manifest, profile = result.manifest, result.profile
    association = dict(zip(manifest.features, profile.association, strict=True))
    page.section("Columns")
    missing = sum(column.missing for column in profile.columns)
    page.text(
        f"Values missing in the source: {missing:,}."
        if missing
        else "No value is missing in the source in the columns below."
    )
    rows = []
    for column in profile.columns[:_MAX_ROWS]:
        statistics = manifest.statistics.get(column.name)
        figures: list[Any] = [None] * 4
        if statistics is not None:
            figures = [statistics.mean, statistics.std, statistics.min, statistics.max]
        share = association.get(column.name)
        rows.append(
            [
                column.name,
                column.role,
                column.kind,
                column.rule,
                column.missing,
                column.wrong,
                *figures,
                share,
            ]
        )
    caption = "Mean, std (1 for a constant), min and max are of the training split before normalisation. " + (
        "Association is 1 when the class alone explains how the feature varies, 0 when it explains nothing."
        if manifest.classes is not None
        else "Association is the absolute correlation with the target."
    )
    if len(profile.columns) > _MAX_ROWS:
        caption += f" The first {_MAX_ROWS} of {len(profile.columns)} columns; manifest.json has all."
    page.table(
        [
            "column",
            "role",
            "type",
            "rules",
            "missing",
            "wrong type",
            "mean",
            "std",
            "min",
            "max",
            "association",
        ],
        rows,
        caption=caption,
    )


def _short(text: str, length: int = 16) -> str:
    # matplotlib takes what is between two dollar signs for a formula.
    text = "".join(mark if mark.isprintable() else " " for mark in text)
    text = text if len(text) <= length else text[: length - 1] + "…"
    return text.replace("$", r"\$")
