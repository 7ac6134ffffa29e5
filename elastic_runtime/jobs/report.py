"""The run report of a job: what happened, what it cost, and loss, throughput and world size on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_runtime.jobs.folder import JobFolder, tail
from elastic_runtime.report import Page
from elastic_runtime.report.charts import PALETTE, canvas, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["render"]

_BADGES = {"succeeded": ("good", "succeeded"), "failed": ("bad", "failed"), "stopped": ("warn", "stopped")}
_SHOWN = frozenset(
    "round worker_failed node_lost node_leaving node_hung recovered pause store_lost ended".split()  # noqa: SIM905
)
_MOST_POINTS = 2000


def render(folder: JobFolder, record: Mapping[str, Any]) -> str:
    """Return the HTML report of the job in `folder`, whose end `record` describes."""
    metrics = folder.metrics()
    recoveries: Sequence[Mapping[str, Any]] = record["recoveries"]
    status, text = _BADGES.get(record["state"], ("warn", record["state"]))
    page = Page(f"Training {record['name']}", _summary(record), status=status, status_text=text)
    page.key_figure("Steps", record["global_step"])
    page.key_figure("Wall time", f"{record['seconds']:.1f} s")
    page.key_figure("Largest world", record["world_size"], "workers")
    page.key_figure("Restarts", record["restarts"], f"of {record['max_restarts']} allowed")
    if metrics and isinstance(metrics[-1].get("loss"), int | float):
        page.key_figure("Last loss", metrics[-1]["loss"])
    done = [recovery for recovery in recoveries if recovery["seconds"] is not None]
    if done:
        page.key_figure("Time lost to failures", f"{sum(recovery['seconds'] for recovery in done):.1f} s")
    if metrics:
        page.section("Course of the run")
        marks = "Dashed red: a failure. Dotted green: training again. " if recoveries else ""
        page.figure(_charts(metrics, record), f"{marks}Bold: the loss, smoothed over the last steps.")
    if recoveries:
        page.section("Failures and recoveries")
        # A program that reports no steps may well have gone on.
        unfinished = "no step reported since" if record["state"] == "succeeded" else "not recovered"
        rows = [
            [
                recovery["cause"],
                f"{recovery['seconds']:.2f} s" if recovery["seconds"] is not None else unfinished,
                recovery["steps_lost"] if recovery["steps_lost"] is not None else "–",
            ]
            for recovery in recoveries
        ]
        page.table(["What failed", "Until the next finished step", "Steps done again"], rows)
    page.section("What happened")
    rows = [
        [f"{event['time'] - record['started']:.2f} s", event["text"]]
        for event in record["events"]
        if event["kind"] in _SHOWN
    ]
    page.table(["After", "Event"], rows)
    if record["state"] == "failed":
        _failure_log(page, folder, record)
    return page.render()


def _summary(record: Mapping[str, Any]) -> str:
    recovered = sum(1 for recovery in record["recoveries"] if recovery["seconds"] is not None)
    if record["state"] == "succeeded":
        if not recovered:
            return f"All {record['global_step']:,} steps were done without a failure."
        times = "once" if recovered == 1 else f"{recovered} times"
        return f"All {record['global_step']:,} steps were done; the job recovered {times} from a failure."
    return f"{record['reason']}."


def _failure_log(page: Page, folder: JobFolder, record: Mapping[str, Any]) -> None:
    failed = [event for event in record["events"] if event["kind"] == "worker_failed"]
    if not failed:
        return
    rank = failed[-1]["rank"]
    text = "\n".join(tail(folder.log_of(rank)).splitlines()[-40:])
    if text:
        page.section(f"End of the log of rank {rank}")
        page.code(text, str(folder.log_of(rank).name))


def _charts(metrics: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    start = record["started"]
    times, loss = _losses(metrics[:: max(1, len(metrics) // _MOST_POINTS)], start)
    rates = _rates(metrics, start)
    rows = 3 if rates else 2
    with canvas(width=8.5, height=1.7 * rows, rows=rows, share_x=True) as (figure, axes):
        axes[0].plot(times, loss, linewidth=0.8, alpha=0.45, color=PALETTE[0])
        axes[0].plot(times, _smoothed(loss), linewidth=1.6, color=PALETTE[0])
        axes[0].set_ylabel("loss")
        positive = [value for value in loss if value > 0]
        if positive and max(positive) > 10 * min(positive):
            axes[0].set_yscale("log")
        if rates:
            axes[1].plot(*zip(*rates, strict=True), linewidth=1.2, color=PALETTE[2])
            axes[1].set_ylabel("samples/s")
            axes[1].set_ylim(bottom=0)
        _world_sizes(axes[-1], metrics, record)
        axes[-1].set_xlabel("seconds since the start")
        for place in axes:
            _marks(place, record)
        return to_svg(figure)


def _rates(
    metrics: Sequence[Mapping[str, Any]], start: float, window: float = 0.25
) -> list[tuple[float, float]]:
    """Return (seconds, samples/s) averaged over `window` seconds, without a line across a restart."""
    points: list[tuple[float, float]] = []
    before: Mapping[str, Any] | None = None
    for line in metrics:
        if "samples" not in line:
            continue
        if before is None or before["round"] != line["round"]:
            if before is not None:
                points.append((line["time"] - start, float("nan")))
            before = line
        elif line["time"] - before["time"] >= window:
            rate = (line["samples"] - before["samples"]) / (line["time"] - before["time"])
            points.append((line["time"] - start, rate))
            before = line
    return points


def _losses(metrics: Sequence[Mapping[str, Any]], start: float) -> tuple[list[float], list[float]]:
    """Return seconds and losses, with a gap where a round ended."""
    times: list[float] = []
    losses: list[float] = []
    for before, line in zip([metrics[0], *metrics], metrics, strict=False):
        if before["round"] != line["round"]:
            times.append(line["time"] - start)
            losses.append(float("nan"))
        times.append(line["time"] - start)
        losses.append(line["loss"] if isinstance(line.get("loss"), int | float) else float("nan"))
    return times, losses


def _smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected for its start (Kingma and Ba, 2015), anew after each gap."""
    averages: list[float] = []
    average, count = 0.0, 0
    for value in values:
        if value != value:
            average, count = 0.0, 0
            averages.append(value)
            continue
        average, count = weight * average + (1 - weight) * value, count + 1
        averages.append(average / (1 - weight**count))
    return averages


def _world_sizes(axes: Axes, metrics: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> None:
    """Draw how many workers were training: none from a round's last finished step to the next round's first."""
    from matplotlib.ticker import MaxNLocator

    start, times, sizes = record["started"], [0.0], [0]
    for before, line in zip([None, *metrics], metrics, strict=False):
        if before is None or before["round"] != line["round"]:
            if before is not None:
                times.append(before["time"] - start)
                sizes.append(0)
            times.append(line["time"] - start)
            sizes.append(line["world_size"])
    times += [metrics[-1]["time"] - start, record["ended"] - start]
    sizes += [0, 0]
    axes.step(times, sizes, where="post", linewidth=1.2, color=PALETTE[4])
    axes.fill_between(times, sizes, step="post", alpha=0.15, color=PALETTE[4], linewidth=0)
    axes.set_ylabel("workers training")
    axes.set_ylim(0, max(sizes) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _marks(axes: Axes, record: Mapping[str, Any]) -> None:
    for event in record["events"]:
        if event["kind"] in ("worker_failed", "node_lost"):
            axes.axvline(event["time"] - record["started"], color=PALETTE[3], linestyle="--", linewidth=1)
        elif event["kind"] == "recovered":
            axes.axvline(event["time"] - record["started"], color=PALETTE[2], linestyle=":", linewidth=1.4)
