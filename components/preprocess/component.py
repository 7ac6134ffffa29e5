"""The preprocess component: raw rows in, a checked and split dataset with its report out."""

from typing import Any

from kfp.dsl import HTML, Dataset, Metrics, Output

from kfp_elastic.components.authoring import component

__all__ = ["preprocess"]


@component
def preprocess(
    dataset: Output[Dataset],
    report: Output[HTML],
    summary: Output[Metrics],
    source: str,
    target: str = "",
    task: str = "auto",
    features: list[str] = [],  # noqa: B006 - kfp reads the default as the parameter's default
    extra_columns: list[str] = [],  # noqa: B006
    schema: dict[str, Any] = {},  # noqa: B006
    schema_file: str = "",
    on_bad_rows: str = "fail",
    max_quarantine_fraction: float = 0.05,
    duplicate_rows: str = "auto",
    train_fraction: float = 0.7,
    validation_fraction: float = 0.15,
    test_fraction: float = 0.15,
    seed: int = 0,
    normalise: str = "standard",
    rows_per_shard: int = 100000,
) -> None:
    """Check, split, normalise and store a table as a dataset folder.

    Args:
        source: A built-in set (breast_cancer, diabetes, digits, iris, wine), or path or fsspec URL of a CSV,
            Parquet or JSON-lines file, or of a folder of such.
        target: Column to predict. May be empty for a built-in set only.
        task: classification, regression, or auto (decided from the target column).
        features: Feature columns in model order. Empty: all columns but the target and the extra ones.
        extra_columns: Columns kept as they are for slices and look-ups, never given to the model.
        schema: Rules per column, such as {"age": {"dtype": "integer", "min": 0, "max": 120}}. The keys are
            dtype (integer, number, boolean, text), nullable, min, max, allowed and unique. Empty: inferred.
        schema_file: YAML or JSON file with the same rules (path or URL), in place of schema.
        on_bad_rows: fail (the first broken rule stops the step) or quarantine (leave bad rows out, keep them
            with their reasons in quarantine.jsonl).
        max_quarantine_fraction: Largest share of the rows, 0 to 1, that may be quarantined.
        duplicate_rows: bad (a repeated row breaks a rule), keep, or auto (keep in a built-in set, else bad).
        train_fraction: Share of the rows for training. The three fractions add up to 1.
        validation_fraction: Share of the rows for validation, may be 0.
        test_fraction: Share of the rows for the test, may be 0.
        seed: Seed of the split, from 0.
        normalise: standard (by mean and standard deviation of the training split) or none.
        rows_per_shard: Most rows in one Parquet file, from 1.

    Returns:
        dataset: Folder with manifest.json and the sharded Parquet files of the three splits.
        report: Data report to look at: splits, findings, class balance, distributions, columns.
        summary: Counts of rows, quarantined rows, features and classes.
    """
    from pathlib import Path

    from elastic_runtime.errors import InputError
    from elastic_runtime.preprocessing import PreprocessConfig, render_report
    from elastic_runtime.preprocessing import preprocess as run

    if schema and schema_file:
        raise InputError(f"schema and schema_file={schema_file!r} are both given: give one")
    config = PreprocessConfig(
        source=source,
        target=target,
        task=task,
        features=features,
        extra_columns=extra_columns,
        schema=schema_file or schema or None,
        on_bad_rows=on_bad_rows,
        max_quarantine_fraction=max_quarantine_fraction,
        duplicate_rows=duplicate_rows,
        train_fraction=train_fraction,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        seed=seed,
        normalise=normalise,
        rows_per_shard=rows_per_shard,
    )
    result = run(config, dataset.path)
    Path(report.path).write_text(render_report(result), encoding="utf-8")
    for name, value in result.metrics().items():
        summary.log_metric(name, value)
    dataset.metadata.update(result.metadata())
