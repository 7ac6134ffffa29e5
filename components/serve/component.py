"""The `serve` component: packages a model, serves it here, and checks that it answers as it should."""

from kfp.dsl import HTML, Artifact, Dataset, Input, Metrics, Model, Output

from kfp_elastic.components.authoring import component

__all__ = ["serve"]


@component
def serve(
    model: Input[Model],
    dataset: Input[Dataset],
    serving: Output[Artifact],
    metrics: Output[Metrics],
    report: Output[HTML],
    name: str = "model",
    port: int = 0,
    samples: int = 16,
) -> str:
    """Package a model for the Open Inference Protocol v2, serve it in this step and check its answers.

    The step starts KServe's model server on the packaged model, sends rows of the test split, compares the
    answer with the prediction made without a server, measures the latency and stops the server. It fails if
    the server does not start or answers something else. It does not deploy to a cluster.

    Args:
        model: Model folder that elastic_train wrote.
        dataset: Dataset folder that preprocess wrote and the model was trained on.
        serving: Folder with the packaged model, model-settings.json, SERVING.md and serving.json.
        metrics: matches_offline (1 or 0), max_difference, latency_p50_ms, latency_p99_ms, ready_seconds.
        report: Page about what was served: a request and its answer, latency, how to call it.
        name: Name of the model in the URL: a DNS label (lower-case letters, digits and '-', at most 63).
        port: TCP port to serve at; 0 takes a free one.
        samples: Number of test rows to compare, 1 to 10,000.

    Returns:
        The URL at which the model was served.
    """
    from elastic_runtime.serving.step import run_serve_step

    done = run_serve_step(
        model.path,
        dataset.path,
        serving_folder=serving.path,
        report_file=report.path,
        name=name,
        port=port,
        samples=samples,
    )
    for key, value in done.metrics().items():
        metrics.log_metric(key, value)
    serving.metadata["url"] = done.report.url
    serving.metadata["sha256"] = done.package.sha256
    return done.report.url
