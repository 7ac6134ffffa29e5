"""Kubeflow Pipelines components and pipelines for elastic distributed training.

`kfp_elastic.components` holds the four components (preprocess, elastic_train, evaluate, serve);
`kfp_elastic.pipelines` the pipelines made of them. The library they call is `elastic_runtime`.
"""
