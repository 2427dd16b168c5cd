"""The page: one self-contained HTML file about a step and its plan."""

from memfit.report.page.writing import page_text, write_page

__all__ = ["page_text", "write_page"]
