"""The runtime behind the Kubeflow components: launching, supervising and observing elastic jobs.

Importing this package is cheap: it loads neither torch, nor kfp, nor torchx. A training script uses
`elastic_runtime.worker`; the command line is `elastic_runtime.cli`.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
