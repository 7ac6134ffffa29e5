"""A report page: headings, key figures, tables and inline charts, rendered with one template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

__all__ = ["Page", "format_value"]


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("elastic_runtime.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["value"] = format_value
    return environment


def format_value(value: Any) -> str:
    """Return `value` as a person reads it: four significant digits for floats, thousands separated."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value != value:
            return "NaN"
        magnitude = abs(value)
        if magnitude >= 1e6 or (0 < magnitude < 1e-3):
            return f"{value:.3g}"
        return f"{value:,.4f}".rstrip("0").rstrip(".") if magnitude < 1000 else f"{value:,.1f}"
    return str(value)


@dataclass(frozen=True)
class _Block:
    kind: str
    content: Any
    caption: str = ""


@dataclass
class _Section:
    heading: str
    anchor: str
    blocks: list[_Block] = field(default_factory=list)


class Page:
    """Collects the content of one report in reading order; `render()` gives the HTML document.

    Text is escaped; only `figure` takes markup, which must come from `elastic_runtime.report.charts`.
    """

    def __init__(self, title: str, subtitle: str = "", *, status: str = "", status_text: str = "") -> None:
        """Start a page. `status` is `good`, `bad`, `warn` or empty and colours the badge `status_text`."""
        self.title = title
        self.subtitle = subtitle
        self.status = status
        self.status_text = status_text
        self._figures: list[tuple[str, Any, str]] = []
        self._sections: list[_Section] = []

    def key_figure(self, label: str, value: Any, note: str = "") -> None:
        """Add one of the large figures under the title."""
        self._figures.append((label, value, note))

    def section(self, heading: str) -> None:
        """Start a section; everything added next goes under it."""
        self._sections.append(_Section(heading, f"s{len(self._sections) + 1}"))

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._add(_Block("text", paragraph))

    def links(self, links: Mapping[str, str]) -> None:
        """Add a line of links, label to relative address; nothing when there are none."""
        if links:
            self._add(_Block("links", dict(links)))

    def code(self, text: str, caption: str = "") -> None:
        """Add preformatted text, such as a traceback or the end of a log."""
        self._add(_Block("code", text, caption))

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        caption: str = "",
        links: Mapping[str, str] | None = None,
    ) -> None:
        """Add a table. A cell whose text is a key of `links` becomes a relative link to its value."""
        body = [list(row) for row in rows]
        numeric = [
            all(isinstance(row[i], int | float | None) and not isinstance(row[i], bool) for row in body)
            and any(row[i] is not None for row in body)
            for i in range(len(columns))
        ]
        content = {"columns": list(columns), "rows": body, "numeric": numeric, "links": dict(links or {})}
        self._add(_Block("table", content, caption))

    def figure(self, svg: str, caption: str = "") -> None:
        """Add an inline SVG chart (see `elastic_runtime.report.charts`)."""
        self._add(_Block("figure", Markup(svg), caption))

    def render(self) -> str:
        """Return the whole page as one HTML document without any external resource."""
        template = _environment().get_template("page.html.jinja")
        return template.render(
            title=self.title,
            subtitle=self.subtitle,
            status=self.status,
            status_text=self.status_text,
            figures=self._figures,
            sections=self._sections,
        )

    def _add(self, block: _Block) -> None:
        if not self._sections:
            self._sections.append(_Section("", "s0"))
        self._sections[-1].blocks.append(block)
