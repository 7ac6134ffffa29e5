"""What every benchmark shares: options, the table, and the JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Result", "options"]


def options(description: str, *, repeats: int, quick: int) -> argparse.Namespace:
    """Parse `--json`, `--quick` and `--repeats`; `.repeats` is `repeats`, or `quick` with `--quick`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--repeats", type=int, help="tries of each side")
    arguments = parser.parse_args()
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: takes a number from 1")
    arguments.repeats = arguments.repeats or (quick if arguments.quick else repeats)
    return arguments


@dataclass
class Result:
    """Measured seconds of ours and the rival, by what was measured."""

    benchmark: str
    ours: dict[str, list[float]] = field(default_factory=dict)
    rival: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    rival_name: str = "rival"
    """In the table's head, and in the figures' names: `X_RIVAL_s`."""
    ratios: Collection[str] | None = None
    """What a ratio is given of; None is everything that both sides were measured in."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the table says instead of the rival's time, by what was measured."""

    def add(self, name: str, *, ours: float | None = None, rival: float | None = None) -> None:
        """Add one try of either side."""
        if ours is not None:
            self.ours.setdefault(name, []).append(ours)
        if rival is not None:
            self.rival.setdefault(name, []).append(rival)

    def show(self, *, as_json: bool, repeats: int) -> None:
        """Print the table and, with `as_json`, the line that INTERFACES promises."""
        both = {
            name: statistics.median(self.rival[name]) / statistics.median(self.ours[name])
            for name in self.ours
            if name in self.rival
        }
        rows: list[Sequence[str]] = [
            ("", f"{self.rival_name} median", "worst", "ours median", "worst", f"{self.rival_name} / ours")
        ]
        for name, ours in self.ours.items():
            rival = self.rival.get(name, [])
            rows.append(
                (
                    name,
                    _seconds(statistics.median(rival)) if rival else self.notes.get(name, "–"),
                    _seconds(max(rival)) if rival else "",
                    _seconds(statistics.median(ours)),
                    _seconds(max(ours)),
                    f"{both[name]:.1f}" if name in both else "",
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
            rivals = {
                f"{name}_{self.rival_name}_s": statistics.median(values)
                for name, values in self.rival.items()
            }
            document = {
                "benchmark": self.benchmark,
                "ratios": {name: both[name] for name in (both if self.ratios is None else self.ratios)},
                "figures": {**medians, **rivals, **self.figures},
                "repeats": repeats,
                "machine": _machine(),
            }
            print(json.dumps({"schema": 1, **document}))
        sys.stdout.flush()


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
