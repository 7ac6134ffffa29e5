"""The steps of a compiled pipeline."""

from kfp import dsl

from kfp_elastic.components.authoring import component
from kfp_elastic.pipelines import REGISTRY
from kfp_elastic.pipelines.compiling import compiled_text, load_pipeline
from kfp_elastic.pipelines.planned import planned_steps


@component
def first(text: str = "") -> str:
    return text


@component
def last(text: str = "") -> str:
    return text


@dsl.pipeline(name="nested")
def nested(text: str = ""):
    model = dsl.importer(artifact_uri="/x", artifact_class=dsl.Model)
    made = first(text=text).after(model)
    with dsl.If(made.output == "a"), dsl.ParallelFor(["b", "c"]) as item:
        last(text=item)
        first(text=item)


def test_the_steps_of_our_pipelines_are_in_the_order_in_which_they_run():
    for entry in REGISTRY.values():
        steps = planned_steps(compiled_text(load_pipeline(entry)))
        assert steps == ["preprocess", "elastic-train", "evaluate", "serve"]


def test_conditions_and_loops_are_looked_into_and_importers_are_no_steps():
    assert planned_steps(compiled_text(nested)) == ["first", "first-2", "last"]
