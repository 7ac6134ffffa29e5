"""The evaluation itself: check, predict, measure, judge."""

from __future__ import annotations

from functools import partial

import numpy as np

from elastic_runtime.datasets import CLASSIFICATION, Split
from elastic_runtime.errors import DataError
from elastic_runtime.evaluation import slices as slicing
from elastic_runtime.evaluation.assessment import Resampling
from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray
from elastic_runtime.evaluation.classifier import ClassificationAssessment
from elastic_runtime.evaluation.config import EvaluateConfig
from elastic_runtime.evaluation.gates import GateResult, Rule, judge
from elastic_runtime.evaluation.inputs import PathLike, check_request, folder_name, predict, read_split
from elastic_runtime.evaluation.regressor import RegressionAssessment
from elastic_runtime.evaluation.result import Comparison, Evaluation, Slices, WorstExample
from elastic_runtime.models import load_model

__all__ = ["evaluate"]

_SHOWN_COLUMNS = 6

_METRIC_OF_GATE = {
    "min_accuracy": "accuracy",
    "min_f1": "f1_macro",
    "min_auc": "auc",
    "max_calibration_error": "calibration_error",
    "min_r2": "r2",
    "max_rmse": "rmse",
    "max_mae": "mae",
}


def evaluate(
    model_folder: PathLike,
    dataset_folder: PathLike,
    config: EvaluateConfig,
    *,
    baseline_folder: PathLike | None = None,
) -> Evaluation:
    """Evaluate the model on `config.split` of the dataset, and judge it by `config.gates`.

    A model whose predictions are not all finite fails the rule `finite_predictions`, which always applies:
    that is a fact about the model, not a wrong input, so the result says `failed` and nothing is measured.

    Raises, before the model runs: `MissingFileError` (no model or dataset there), `InputError` (model and
    dataset differ in task, target, features or classes; a gate that does not apply to the task or lacks its
    baseline), `UnknownNameError` (split or slice column), `DataError` (empty split, values that are not
    finite, a gate whose metric is undefined on this split) and `IntegrityError` (a damaged file). After it:
    `DataError` when a baseline's predictions are not finite, or no slice is large enough to be gated.
    """
    manifest = check_request(model_folder, dataset_folder, baseline_folder, config)
    split = read_split(dataset_folder, config)
    output = predict(load_model(model_folder), split.features)
    result = partial(
        Evaluation,
        model_name=folder_name(model_folder),
        dataset_name=manifest.name,
        task=manifest.task,
        target=manifest.target,
        rows=len(split),
        config=config,
    )
    broken = _rows_not_finite(output)
    if len(broken):
        return result(
            gate=_not_finite(len(broken), len(split)),
            assessment=None,
            worst=tuple(_example(split, int(row), {"predicted": "not finite"}) for row in broken[:20]),
            remarks=("No metric was computed: predictions that are not finite have no error to average.",),
        )
    assessment = _assess(output, split, config)
    remarks = [f"{metric} is undefined: {reason}." for metric, reason in assessment.undefined.items()]
    remarks += assessment.remarks
    parts = _slices(assessment, split, config) if config.slice_by else None
    if parts is not None and any(row.small for row in parts.rows):
        remarks.append(
            f"Slices with fewer than {config.min_slice_rows} rows are flagged as small; no gate sees them."
        )
    comparison = None
    if baseline_folder is not None:
        comparison = _compare(assessment, baseline_folder, split, config)
    return result(
        gate=_judge(config, assessment, parts, comparison),
        assessment=assessment,
        slices=parts,
        baseline=comparison,
        worst=_worst(assessment, split, config.worst_examples),
        remarks=tuple(remarks),
    )


def _rows_not_finite(output: FloatArray) -> IntArray:
    return np.flatnonzero(~np.isfinite(output.reshape(len(output), -1)).all(axis=1))


def _not_finite(broken: int, rows: int) -> GateResult:
    reason = f"the model's predictions are not finite (NaN or infinite) in {broken:,} of {rows:,} rows"
    rule = Rule(name="finite_predictions", limit=0.0, value=float(broken), passed=False, reason=reason)
    return GateResult(passed=False, reason=reason, rules=(rule,))


def _assess(
    output: FloatArray, split: Split, config: EvaluateConfig
) -> ClassificationAssessment | RegressionAssessment:
    resampling = Resampling(resamples=config.bootstrap, confidence=config.confidence, seed=config.seed)
    if split.manifest.task == CLASSIFICATION:
        return ClassificationAssessment(
            output,
            split.target.astype(np.int64),
            split.manifest.classes or (),
            resampling,
            calibration_bins=config.calibration_bins,
        )
    return RegressionAssessment(output, split.target.astype(np.float64), resampling)


def _slices(
    assessment: ClassificationAssessment | RegressionAssessment, split: Split, config: EvaluateConfig
) -> Slices:
    manifest = split.manifest
    column = config.slice_by
    statistics = manifest.statistics.get(column) if manifest.normalisation == "standard" else None
    cut = slicing.cut(
        split.frame[column],
        bins=config.slice_bins,
        labels=manifest.classes if column == manifest.target else None,
        scale=(statistics.mean, statistics.std) if statistics else (0.0, 1.0),
    )
    rows = tuple(
        slicing.SliceRow(
            label=label,
            rows=len(index),
            small=len(index) < config.min_slice_rows,
            metrics=assessment.on_rows(index, purpose=i),
        )
        for i, (label, index) in enumerate(cut)
    )
    metric = assessment.slice_primary
    worst = _worst_slice(rows, metric, higher_is_better=metric == "accuracy")
    return Slices(column=column, metric=metric, rows=rows, worst=worst)


def _worst_slice(rows: tuple[slicing.SliceRow, ...], metric: str, *, higher_is_better: bool) -> str | None:
    judged = [row for row in rows if not row.small]
    if not judged:
        return None
    pick = min if higher_is_better else max
    return pick(judged, key=lambda row: row.metrics[metric].value).label


def _compare(
    assessment: ClassificationAssessment | RegressionAssessment,
    baseline_folder: PathLike,
    split: Split,
    config: EvaluateConfig,
) -> Comparison:
    output = predict(load_model(baseline_folder), split.features)
    broken = _rows_not_finite(output)
    if len(broken):
        raise DataError(
            f"baseline {folder_name(baseline_folder)!r}: its predictions are not finite in {len(broken):,} "
            f"of {len(split):,} rows, so nothing can be compared with it: give another baseline or none"
        )
    other = _assess(output, split, config)
    if isinstance(assessment, ClassificationAssessment) and isinstance(other, ClassificationAssessment):
        return Comparison(metrics=tuple(assessment.against(other)))
    assert isinstance(assessment, RegressionAssessment)
    assert isinstance(other, RegressionAssessment)
    return Comparison(metrics=tuple(assessment.against(other)))


def _judge(
    config: EvaluateConfig,
    assessment: ClassificationAssessment | RegressionAssessment,
    parts: Slices | None,
    comparison: Comparison | None,
) -> GateResult:
    values: dict[str, tuple[float, str]] = {}
    for gate in config.gates:
        if gate == "max_regression":
            assert comparison is not None
            values[gate] = (comparison.drop, comparison.metrics[0].name)
        elif gate == "min_slice_accuracy":
            assert parts is not None
            if parts.worst is None:
                raise DataError(
                    f"gates: min_slice_accuracy cannot be judged: no slice of {parts.column!r} has "
                    f"{config.min_slice_rows} rows; slice by a column with fewer values"
                )
            worst = next(row for row in parts.rows if row.label == parts.worst)
            values[gate] = (worst.metrics["accuracy"].value, f"({parts.column} = {worst.label})")
        else:
            values[gate] = (assessment.metrics[_METRIC_OF_GATE[gate]].value, "")
    return judge(config.gates, values)


def _worst(
    assessment: ClassificationAssessment | RegressionAssessment, split: Split, number: int
) -> tuple[WorstExample, ...]:
    badness = assessment.badness()
    order = np.argsort(-badness, kind="stable")[:number]
    if isinstance(assessment, ClassificationAssessment):
        # A right answer with little confidence is no mistake to look at.
        order = order[assessment.predicted[order] != assessment.target[order]]
    return tuple(_example(split, int(row), assessment.describe_row(int(row))) for row in order)


def _example(split: Split, row: int, prediction: dict[str, object]) -> WorstExample:
    shown = split.manifest.extra_columns[:_SHOWN_COLUMNS]
    columns = {column: split.frame[column].iloc[row] for column in shown}
    return WorstExample(row=row, prediction=prediction, columns=columns)
