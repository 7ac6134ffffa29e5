"""What every benchmark shares: options, the table, and the JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Result", "options"]


def options(description: str, *, repeats: int, quick: int) -> argparse.Namespace:
    """Parse `--json`, `--quick` and `--repeats`; `.repeats` is `repeats`, or `quick` with `--quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="last line: one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--repeats", type=int, help="tries of each side")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (quick if arguments.quick else repeats)
    return arguments


@dataclass
class Result:
    """Measured seconds of ours and the rival, by what was measured."""

    benchmark: str
    ours: dict[str, list[float]] = field(default_factory=dict)
    rival: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, *, ours: float | None = None, rival: float | None = None) -> None:
        """Add one try of either side."""
        if ours is not None:
            self.ours.setdefault(name, []).append(ours)
        if rival is not None:
            self.rival.setdefault(name, []).append(rival)

    def show(self, *, as_json: bool, repeats: int, units: Mapping[str, str] | None = None) -> None:
        """Print the table and, with `as_json`, the line that INTERFACES promises."""
        ratios = {
            name: statistics.median(self.rival[name]) / statistics.median(self.ours[name])
            for name in self.ours
            if name in self.rival
        }
        rows: list[Sequence[str]] = [("", "rival median", "worst", "ours median", "worst", "rival / ours")]
        for name in self.ours:
            rival = self.rival.get(name, [])
            rows.append(
                (
                    name,
                    f"{statistics.median(rival):.2f} s" if rival else "–",
                    f"{max(rival):.2f} s" if rival else "–",
                    f"{statistics.median(self.ours[name]):.2f} s",
                    f"{max(self.ours[name]):.2f} s",
                    f"{ratios[name]:.1f}" if name in ratios else "–",
                )
            )
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print(f"{repeats} repeats each, interleaved; {_machine()}")
        for name, value in self.figures.items():
            print(f"{name}: {value:g}")
        if as_json:
            medians = {f"{name}_s": statistics.median(values) for name, values in self.ours.items()}
            rivals = {f"{name}_rival_s": statistics.median(values) for name, values in self.rival.items()}
            document = {
                "benchmark": self.benchmark,
                "ratios": ratios,
                "figures": {**medians, **rivals, **self.figures},
                "repeats": repeats,
                "machine": _machine(),
            }
            print(json.dumps({"schema": 1, **document}))
        sys.stdout.flush()


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
