"""The `evaluate` component: a thin call of `elastic_runtime.evaluation`."""

from typing import Any

from kfp.dsl import HTML, Artifact, ClassificationMetrics, Dataset, Input, Markdown, Metrics, Model, Output

from kfp_elastic.components.authoring import component
from kfp_elastic.components.checks import check_gates

__all__ = ["evaluate"]


def _check(constants: dict[str, Any]) -> None:
    """Refuse gates that do not exist, and limits that no value can have."""
    if "gates" in constants:
        check_gates(constants["gates"])


@component(checked=_check)
def evaluate(
    model: Input[Model],
    dataset: Input[Dataset],
    metrics: Output[Metrics],
    classification: Output[ClassificationMetrics],
    report: Output[HTML],
    summary: Output[Markdown],
    evaluation: Output[Artifact],
    baseline: Input[Model] = None,
    split: str = "test",
    gates: dict = {},  # type: ignore[type-arg]  # noqa: B006 - kfp reads the default, nobody changes it
    slice_by: str = "",
    bootstrap: int = 1000,
    seed: int = 0,
) -> str:
    """Evaluate a model on a split of a dataset and judge it by quality gates.

    Classification: accuracy, F1, precision, recall, confusion matrix, ROC, calibration. Regression: RMSE,
    MAE, R², residuals. All with bootstrap intervals, per slice of a column, and against a baseline.

    Args:
        model: Model folder, as training writes it (config.json, model.safetensors, model.pt2).
        dataset: Dataset folder, as preprocess writes it.
        metrics: Metrics by name, such as test_accuracy, test_accuracy_low and test_accuracy_high.
        classification: Confusion matrix and ROC curve (of the second of two classes; of more classes the
            micro-average). Empty for regression.
        report: Report for people, one HTML page.
        summary: The report's main tables as Markdown.
        evaluation: Everything as one JSON file (evaluation.json).
        baseline: Model folder to compare with on the same rows; leave out for no comparison.
        split: Name of the split to evaluate on: test, validation or train.
        gates: Limits by name, such as {"min_accuracy": 0.95}: min_accuracy, min_f1, min_auc,
            max_calibration_error, min_slice_accuracy (classification), min_r2, max_rmse, max_mae
            (regression), max_regression (largest drop against the baseline). Empty: nothing is asked for.
        slice_by: Column to give metrics per slice for: a feature, the target or an extra column; empty for
            none.
        bootstrap: Number of bootstrap resamples for the intervals, 0 for no intervals.
        seed: Seed of the resampling; the same seed gives the same intervals.

    Returns:
        "passed" or "failed": the verdict of the gates. Branch on it with dsl.If.
    """
    from elastic_runtime.evaluation import EvaluateConfig, write_outputs
    from elastic_runtime.evaluation import evaluate as run

    config = EvaluateConfig(split=split, gates=gates or {}, slice_by=slice_by, bootstrap=bootstrap, seed=seed)
    result = run(
        model.path, dataset.path, config, baseline_folder=baseline.path if baseline is not None else None
    )
    write_outputs(
        result,
        report=report.path,
        summary=summary.path,
        document=evaluation.path,
        metrics=metrics.path,
        classification=classification.path,
    )
    for name, value in result.metrics.items():
        metrics.log_metric(name, value)
    confusion, curve = result.confusion_view(), result.roc_view()
    if confusion is not None:
        classification.log_confusion_matrix(*confusion)
    if curve is not None:
        classification.log_roc_curve(
            curve.false_positive_rate.tolist(), curve.true_positive_rate.tolist(), curve.thresholds.tolist()
        )
        classification.metadata["rocCurve"] = curve.name
    evaluation.metadata.update({"verdict": result.gate.verdict, "reason": result.gate.reason, "split": split})
    return result.gate.verdict
