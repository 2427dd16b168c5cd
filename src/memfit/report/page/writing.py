"""The page as a file: assets and data put together so that nothing in the data can become markup.

Note [Safe to open]: module names, op names and source lines come from whoever wrote the model. Data is JSON in a script
element that is never run, with every character escaped that could end it; the page's script shows it with `textContent`
only. What Python writes into the markup is escaped. A content security policy allows the one script and the one style
of the page, by their hashes, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from memfit.analysis import Lever, Report
from memfit.files import write_whole
from memfit.report.headline import Headline, headline
from memfit.report.page.data import page_data

_SCRIPTS = ("format.js", "elements.js", "timeline.js", "tree.js", "curve.js", "tables.js", "page.js")
_MARK = re.compile(r"<!--memfit:(\w+)-->")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_page(report: Report, path: str | os.PathLike[str], *, levers: Sequence[Lever] = ()) -> Path:
    """Write the page about a step and its plan to one file that opens from disk, with the levers of an explanation."""
    return write_whole(path, page_text(report, levers=levers).encode(), "report.html")


def page_text(report: Report, *, levers: Sequence[Lever] = ()) -> str:
    """Return the page; the same report gives the same text."""
    words = headline(report)
    style = load_asset("page.css")
    script = "'use strict';\n(() => {\n" + "\n".join(map(load_asset, _SCRIPTS)) + "\n})();\n"
    parts = {
        "title": html.escape(words.title),
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{page_policy(style, script)}">',
        "style": f"<style>{style}</style>",
        "headline": _markup(words),
        "data": f'<script type="application/json" id="data">{safe_json(page_data(report, levers))}</script>',
        "script": f"<script>{script}</script>",
    }
    return _MARK.sub(lambda match: parts[match[1]], load_asset("page.html"))


def safe_json(data: object) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = msgspec.json.encode(data).decode()
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match[0]], text)


def _markup(words: Headline) -> str:
    sentences = "\n".join(f"<p>{html.escape(each)}</p>" for each in words.sentences)
    return (
        f'<p class="subject">{html.escape(words.subject)}</p>\n'
        f'<h1 data-tone="{words.tone}"><span class="verdict">{html.escape(words.verdict)}</span> '
        f"<span>{_with_units(html.escape(words.figures))}</span></h1>\n"
        f'<div class="why">{sentences}</div>'
    )


def _with_units(text: str) -> str:
    """Join each number and its unit, so that they stay on one line."""
    return re.sub(r"(?<=\d) (?=[KMGT]iB\b|B\b|[mu]?s\b)", "&nbsp;", text)


def page_policy(style: str, script: str | None = None) -> str:
    """Return the content security policy of a page with this style and, if any, this script."""
    scripts = "" if script is None else f" script-src '{_hash(script)}';"
    return (
        f"default-src 'none';{scripts} style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def load_asset(name: str) -> str:
    """Return the text of a file that pages are put together from."""
    return (resources.files("memfit.report.page") / "assets" / name).read_text("utf-8")
