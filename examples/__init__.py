"""Training scripts to copy from. They are installed as `kfp_elastic.examples`, for the pipelines run them too."""
