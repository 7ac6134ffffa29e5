"""HTML pages that stand alone: no script, no font, no image from elsewhere, readable in light and dark."""

from elastic_runtime.report.page import Page

__all__ = ["Page"]
