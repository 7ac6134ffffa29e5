"""The HTML report of an evaluation: verdict first, then what it rests on."""

from __future__ import annotations

from elastic_runtime.evaluation import plots
from elastic_runtime.evaluation.bootstrap import Interval
from elastic_runtime.evaluation.classifier import ClassificationAssessment
from elastic_runtime.evaluation.regressor import RegressionAssessment
from elastic_runtime.evaluation.result import Comparison, Evaluation, Slices
from elastic_runtime.evaluation.summary import show_interval
from elastic_runtime.report import Page

__all__ = ["render_report"]

_TITLES = {
    "accuracy": "Accuracy",
    "f1_macro": "F1 (macro)",
    "auc": "AUC",
    "calibration_error": "Calibration error",
    "log_loss": "Log loss",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "mean_error": "Mean error",
}
_KEY_FIGURES = {
    "classification": ("accuracy", "f1_macro", "auc", "log_loss", "calibration_error"),
    "regression": ("r2", "rmse", "mae", "mean_error"),
}
_CONFUSION_CLASSES = 30
_PER_CLASS_ROWS = 100
_CONFUSED_PAIRS = 10


def render_report(evaluation: Evaluation) -> str:
    """Return the report as one HTML document without any external resource."""
    page = Page(
        f"Evaluation of {evaluation.target}",
        f"{evaluation.task} on {evaluation.rows:,} rows of the split “{evaluation.split}” of "
        f"{evaluation.dataset_name}",
        status=_status(evaluation),
        status_text=f"gate {evaluation.gate.verdict}" if evaluation.gate.rules else "no gate asked for",
    )
    assessment = evaluation.assessment
    if assessment is not None:
        for name in _KEY_FIGURES[evaluation.task]:
            if name in assessment.metrics:
                interval = assessment.metrics[name]
                page.key_figure(_TITLES[name], interval.value, show_interval(interval))
            else:
                page.key_figure(_TITLES[name], None, "undefined here, see remarks")
    _gates(page, evaluation)
    if evaluation.remarks:
        page.section("Remarks")
        for remark in evaluation.remarks:
            page.text(remark)
    if evaluation.baseline is not None:
        _baseline(page, evaluation.baseline)
    if isinstance(assessment, ClassificationAssessment):
        _classification(page, assessment)
    elif isinstance(assessment, RegressionAssessment):
        _regression(page, assessment, evaluation.target)
    if evaluation.slices is not None:
        _slices(page, evaluation.slices)
    _worst(page, evaluation)
    _metrics(page, evaluation)
    return page.render()


def _status(evaluation: Evaluation) -> str:
    if not evaluation.gate.rules:
        return ""
    return "good" if evaluation.gate.passed else "bad"


def _gates(page: Page, evaluation: Evaluation) -> None:
    page.section("Gate")
    page.text(f"{evaluation.gate.verdict.capitalize()}: {evaluation.gate.reason}.")
    if evaluation.gate.rules:
        page.table(
            ["rule", "limit", "value", "result", "in words"],
            [
                [rule.name, rule.limit, rule.value, "passed" if rule.passed else "failed", rule.reason]
                for rule in evaluation.gate.rules
            ],
        )


def _baseline(page: Page, comparison: Comparison) -> None:
    page.section("Against the baseline")
    page.table(
        ["metric", "model", "baseline", "difference", "interval", "verdict"],
        [
            [
                metric.name,
                metric.model,
                metric.baseline,
                metric.difference.value,
                show_interval(metric.difference),
                metric.verdict,
            ]
            for metric in comparison.metrics
        ],
        caption="Both models on the same rows, resampled together (paired bootstrap). "
        "Difference: model minus baseline.",
    )


def _classification(page: Page, assessment: ClassificationAssessment) -> None:
    page.section("Confusion")
    if len(assessment.classes) <= _CONFUSION_CLASSES:
        page.figure(
            plots.confusion(assessment.confusion, assessment.classes),
            "Rows: true class. Columns: predicted class. Shade: share of the true class.",
        )
    else:
        page.text(f"{len(assessment.classes)} classes are too many to draw. The most frequent mistakes:")
    pairs = _confused(assessment)
    if pairs:
        page.table(["true class", "predicted as", "rows", "share of the true class"], pairs)
    else:
        page.text("Every row was predicted rightly.")

    page.section("Classes")
    rows = sorted(assessment.per_class, key=lambda row: 2.0 if row.f1 is None else row.f1)
    shown = rows if len(rows) > _PER_CLASS_ROWS else assessment.per_class
    page.table(
        ["class", "rows", "predicted", "precision", "recall", "F1", "AUC"],
        [
            [row.label, row.rows, row.predicted, row.precision, row.recall, row.f1, row.auc]
            for row in shown[:_PER_CLASS_ROWS]
        ],
        caption=f"The {_PER_CLASS_ROWS} classes with the lowest F1." if len(rows) > _PER_CLASS_ROWS else "",
    )
    page.text(
        "Always answering the most frequent class would give an accuracy of "
        f"{assessment.majority_accuracy:.4f}."
    )

    page.section("ROC and calibration")
    if assessment.curves:
        two = len(assessment.classes) == 2
        page.figure(
            plots.roc(assessment.curves),
            f"ROC curve of the class “{assessment.classes[1]}”."
            if two
            else "ROC, one class against the rest: all decisions pooled (micro-average), and the "
            "classes that are separated worst.",
        )
    page.figure(
        plots.reliability_chart(assessment.reliability),
        f"Reliability: how often predictions of a confidence are right. Expected calibration error "
        f"{assessment.reliability.expected_error:.4f}. Bars below the diagonal mean too much confidence.",
    )


def _confused(assessment: ClassificationAssessment) -> list[list[object]]:
    matrix = assessment.confusion.copy()
    support = matrix.sum(axis=1)
    for i in range(len(matrix)):
        matrix[i, i] = 0
    order = (-matrix).ravel().argsort(kind="stable")[:_CONFUSED_PAIRS]
    pairs = [(int(place) // len(matrix), int(place) % len(matrix)) for place in order]
    return [
        [
            assessment.classes[true],
            assessment.classes[predicted],
            int(matrix[true, predicted]),
            float(matrix[true, predicted] / support[true]),
        ]
        for true, predicted in pairs
        if matrix[true, predicted]
    ]


def _regression(page: Page, assessment: RegressionAssessment, target: str) -> None:
    page.section("Residuals")
    page.figure(
        plots.predicted_against_true(assessment.target, assessment.predicted, target),
        "Predicted against true values; the line is a perfect prediction.",
    )
    page.figure(
        plots.residuals(assessment.predicted, assessment.residuals),
        "Residual: prediction minus true value. Left over the prediction, right their distribution.",
    )
    page.table(
        ["quantile of the residual", "value"],
        [[f"{level * 100:g} %", value] for level, value in assessment.quantiles.items()],
    )


def _slices(page: Page, slices: Slices) -> None:
    page.section(f"Slices by {slices.column}")
    names = list(dict.fromkeys(name for row in slices.rows for name in row.metrics))
    page.figure(plots.slice_chart(slices), f"{_TITLES[slices.metric]} per slice with its interval.")
    page.table(
        ["slice", "rows", *names, f"interval of {slices.metric}", ""],
        [
            [
                row.label,
                row.rows,
                *(row.metrics[name].value if name in row.metrics else None for name in names),
                show_interval(row.metrics[slices.metric]),
                "small" if row.small else "worst" if row.label == slices.worst else "",
            ]
            for row in slices.rows
        ],
    )


def _worst(page: Page, evaluation: Evaluation) -> None:
    if not evaluation.worst:
        return
    first = evaluation.worst[0]
    page.section("Rows without a finite prediction" if evaluation.assessment is None else "Worst examples")
    page.table(
        ["row", *first.prediction, *first.columns],
        [
            [str(example.row), *example.prediction.values(), *map(_cell, example.columns.values())]
            for example in evaluation.worst
        ],
        caption="Row: number of the row in the split, from 0."
        + ("" if evaluation.task == "regression" else " Mistakes only, the least probable true class first."),
    )


def _cell(value: object) -> object:
    shown = value.item() if hasattr(value, "item") else value
    if isinstance(shown, str) and len(shown) > 80:
        return shown[:79] + "…"
    return shown


def _metrics(page: Page, evaluation: Evaluation) -> None:
    if evaluation.assessment is None:
        return
    page.section("All metrics")
    config = evaluation.config
    rows: list[list[object]] = [
        [f"{evaluation.split}_{name}", one.value, _edge(one, "low"), _edge(one, "high")]
        for name, one in evaluation.assessment.metrics.items()
    ]
    rows += [[f"{evaluation.split}_{name}", None, None, None] for name in evaluation.undefined]
    caption = (
        f"Interval: {config.confidence * 100:g} % percentile bootstrap, {config.bootstrap:,} resamples of "
        f"the rows, seed {config.seed}."
        if config.bootstrap
        else "No intervals were asked for."
    )
    page.table(["metric", "value", "low", "high"], rows, caption=caption)


def _edge(interval: Interval, side: str) -> float | None:
    edge: float | None = getattr(interval, side)
    return edge
