"""The four Kubeflow components. Importing a name loads kfp; importing this package does not."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfp_elastic.components.elastic_train.component import elastic_train
    from kfp_elastic.components.evaluate.component import evaluate
    from kfp_elastic.components.preprocess.component import preprocess
    from kfp_elastic.components.serve.component import serve

__all__ = ["elastic_train", "evaluate", "preprocess", "serve"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"kfp_elastic.components.{name}.component"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Components(ModuleType):
    """Keeps each component's name for the component: Python would bind it to the folder of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Components
