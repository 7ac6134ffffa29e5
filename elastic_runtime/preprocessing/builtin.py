"""Real data sets that scikit-learn carries in its package: nothing is downloaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_runtime.errors import UnknownNameError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BUILTIN_NAMES", "BUILTIN_TARGET", "Builtin", "builtin_name", "load_builtin"]

BUILTIN_NAMES: Final = ("breast_cancer", "diabetes", "digits", "iris", "wine")
BUILTIN_TARGET: Final = "target"
_PREFIX: Final = "builtin:"


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A built-in set: `table` with the features in their own order and the target last, and its sha256."""

    name: str
    task: str
    table: pa.Table
    sha256: str


def builtin_name(source: str) -> str | None:
    """Return the built-in set that `source` names (`digits` or `builtin:digits`), or None for a path or URL.

    Raises `UnknownNameError` for `builtin:` with another name.
    """
    if source.startswith(_PREFIX):
        name = source.removeprefix(_PREFIX)
        if name not in BUILTIN_NAMES:
            raise UnknownNameError.of("built-in set", name, BUILTIN_NAMES)
        return name
    return source if source in BUILTIN_NAMES else None


def load_builtin(name: str) -> Builtin:
    """Load the built-in set `name`; class labels are the names that scikit-learn gives them, as text."""
    import numpy as np
    import pyarrow as pa
    from sklearn import datasets

    bunch: Any = getattr(datasets, f"load_{name}")()
    features = [str(feature) for feature in bunch.feature_names]
    columns: dict[str, Any] = {
        feature: bunch.data[:, i].astype(np.float64) for i, feature in enumerate(features)
    }
    regression = name == "diabetes"
    digest = hashlib.sha256("\n".join(features).encode())
    digest.update(np.ascontiguousarray(bunch.data, dtype="<f8").tobytes())
    digest.update(np.ascontiguousarray(bunch.target, dtype="<f8").tobytes())
    if regression:
        columns[BUILTIN_TARGET] = bunch.target.astype(np.float64)
    else:
        columns[BUILTIN_TARGET] = [str(bunch.target_names[index]) for index in bunch.target]
    return Builtin(
        name=name,
        task="regression" if regression else "classification",
        table=pa.table(columns),
        sha256=digest.hexdigest(),
    )
