"""What an evaluation is asked to do, checked before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic_runtime.errors import InputError
from elastic_runtime.evaluation.gates import check_gates

__all__ = ["EvaluateConfig"]

_MAX_RESAMPLES = 100_000


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Parameters of one evaluation. Raises `InputError` naming the field, its value and the fix."""

    split: str = "test"
    """Split of the dataset to evaluate on; it prefixes the names of the metrics."""

    gates: Mapping[str, float] = field(default_factory=dict)
    """Limits by gate name (see `elastic_runtime.evaluation.gates.GATES`); empty asks for nothing."""

    slice_by: str = ""
    """Column (a feature, the target or an extra column) to give metrics per slice for; empty for none."""

    bootstrap: int = 1000
    """Number of resamples for the intervals, 0 for no intervals; otherwise 100 to 100,000."""

    confidence: float = 0.95
    """Coverage of the intervals, between 0.5 and 0.999."""

    seed: int = 0
    """Seed of the resampling: the same seed, model and data give the same intervals."""

    slice_bins: int = 4
    """Number of quantile bins for a numeric slice column with many values, 2 to 50."""

    min_slice_rows: int = 30
    """A slice with fewer rows is flagged as small, and no gate looks at it."""

    calibration_bins: int = 15
    """Number of equal-width confidence bins, 2 to 100."""

    worst_examples: int = 20
    """How many of the worst predictions the report lists, 0 to 1000."""

    def __post_init__(self) -> None:
        """Check every field and freeze the gates."""
        for name in ("split", "slice_by"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InputError(f"{name}={value!r:.80} is not text: give a name")
        if not self.split:
            raise InputError("split='' is empty: give the name of a split, such as 'test'")
        self._whole("bootstrap", 0, _MAX_RESAMPLES, "0 turns the intervals off")
        if 0 < self.bootstrap < 100:
            raise InputError(
                f"bootstrap={self.bootstrap} is too few for an interval: give 100 or more, or 0 for none"
            )
        self._whole("seed", 0, 2**63 - 1)
        self._whole("slice_bins", 2, 50)
        self._whole("min_slice_rows", 1, 10**9)
        self._whole("calibration_bins", 2, 100)
        self._whole("worst_examples", 0, 1000)
        number = isinstance(self.confidence, int | float) and not isinstance(self.confidence, bool)
        if not number or not 0.5 <= self.confidence <= 0.999:
            raise InputError(f"confidence={self.confidence!r:.80} is not between 0.5 and 0.999, such as 0.95")
        object.__setattr__(self, "gates", MappingProxyType(check_gates(self.gates)))
        if "min_slice_accuracy" in self.gates and not self.slice_by:
            raise InputError("gates: min_slice_accuracy needs slices: set slice_by to the name of a column")

    def _whole(self, name: str, low: int, high: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, float) and value.is_integer():
            # kfp turns whole numbers that are nested in lists or dicts into floats.
            value = int(value)
            object.__setattr__(self, name, value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            extra = f" ({hint})" if hint else ""
            raise InputError(f"{name}={value!r:.80} is not a whole number from {low:,} to {high:,}{extra}")
