"""From a job to its end: the torchx AppDef and components, submitting and following, the training step."""
