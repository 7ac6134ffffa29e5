"""Handwritten digits, end to end: preprocess, train on two workers, evaluate, serve what passes."""

from kfp import dsl

from kfp_elastic.components import elastic_train, evaluate, preprocess, serve
from kfp_elastic.pipelines.sources import module_sha256

__all__ = ["digits"]

_SCRIPT = "kfp_elastic.examples.elastic_digits"


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="digits", description="Classify scikit-learn's handwritten digits with elastic training."
)
def digits(
    epochs: int = 20,
    lr: float = 3e-3,
    batch_size: int = 64,
    nodes: str = "1:2",
    max_restarts: int = 10,
    min_accuracy: float = 0.95,
    seed: int = 0,
) -> None:
    """Preprocess the digits, train on them, evaluate on the test split, and serve the model if it is good.

    Args:
        epochs: Passes over the training split.
        lr: Learning rate of the optimizer.
        batch_size: Samples of a training step over all workers together.
        nodes: Fewest and most nodes, as MIN:MAX, each with one worker.
        max_restarts: Failures of workers that the training job survives.
        min_accuracy: Lowest accuracy on the test split with which the model is served, from 0 to 1.
        seed: Seed of the split, the training order and the initial weights.
    """
    data = preprocess(source="digits", seed=seed)
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
        gates={"min_accuracy": min_accuracy},
        seed=seed,
    )
    with dsl.If(evaluation.outputs["Output"] == "passed", name="gate-passed"):
        serve(model=training.outputs["model"], dataset=data.outputs["dataset"], name="digits")
