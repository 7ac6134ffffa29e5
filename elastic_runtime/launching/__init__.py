"""From a script to a running job: the specification, the torchx AppDef, submitting and following."""
