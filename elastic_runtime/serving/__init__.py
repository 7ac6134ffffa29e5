"""Serving a model folder over the Open Inference Protocol v2, on this machine and packaged for a cluster.

Only the server process imports kserve and torch; what starts it, talks to it and reports does not need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_runtime.serving.local import ServeReport, serve_locally
    from elastic_runtime.serving.package import PackagedModel, package_model
    from elastic_runtime.serving.process import Server, start_server
    from elastic_runtime.serving.report import render_report

__all__ = [
    "PackagedModel",
    "ServeReport",
    "Server",
    "package_model",
    "render_report",
    "serve_locally",
    "start_server",
]

_LAZY = {
    "PackagedModel": "package",
    "ServeReport": "local",
    "Server": "process",
    "package_model": "package",
    "render_report": "report",
    "serve_locally": "local",
    "start_server": "process",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
