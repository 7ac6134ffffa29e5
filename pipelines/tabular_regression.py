"""A table of numbers, end to end: preprocess, train on two workers, evaluate, serve what passes."""

from kfp import dsl

from kfp_elastic.components import elastic_train, evaluate, preprocess, serve
from kfp_elastic.pipelines.sources import module_sha256

__all__ = ["tabular_regression"]

_SCRIPT = "kfp_elastic.examples.tabular"


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="tabular-regression",
    description="Predict the progression of diabetes from a table with elastic training.",
)
def tabular_regression(
    source: str = "diabetes",
    target: str = "",
    epochs: int = 60,
    lr: float = 3e-3,
    batch_size: int = 32,
    nodes: str = "1:2",
    max_restarts: int = 10,
    min_r2: float = 0.3,
    seed: int = 0,
) -> None:
    """Preprocess a table, train on it, evaluate on the test split, and serve the model if it is good.

    Args:
        source: The built-in set "diabetes", or a file, folder or URL of CSV, Parquet or JSON lines.
        target: Column to predict; empty for the built-in set's own.
        epochs: Passes over the training split.
        lr: Learning rate of the optimizer.
        batch_size: Samples of a training step over all workers together.
        nodes: Fewest and most nodes, as MIN:MAX, each with one worker.
        max_restarts: Failures of workers that the training job survives.
        min_r2: Lowest R² on the test split with which the model is served; 1 is perfect, 0 predicts the mean.
        seed: Seed of the split, the training order and the initial weights.
    """
    data = preprocess(source=source, target=target, task="regression", seed=seed)
    training = elastic_train(
        dataset=data.outputs["dataset"],
        module=_SCRIPT,
        script_sha256=module_sha256(_SCRIPT),
        # A folder `elastic_runtime/` or `kfp_elastic/` where the run is started must not be taken for ours.
        env={"PYTHONSAFEPATH": "1"},
        arguments=["--data", "{dataset}"],
        hyperparameters={"epochs": epochs, "lr": lr, "batch-size": batch_size, "seed": seed},
        nodes=nodes,
        max_restarts=max_restarts,
    )
    evaluation = evaluate(
        model=training.outputs["model"],
        dataset=data.outputs["dataset"],
        gates={"min_r2": min_r2},
        seed=seed,
    )
    with dsl.If(evaluation.outputs["Output"] == "passed", name="gate-passed"):
        serve(model=training.outputs["model"], dataset=data.outputs["dataset"], name="tabular-regression")
