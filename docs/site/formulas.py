r"""mkdocs hook: turn formulas into MathML, which browsers render without a script.

pymdownx.arithmatex has already marked them: ``\(...\)`` or ``\[...\]`` in an element of class
arithmatex.
"""

import html
import logging
import re

from latex2mathml.converter import convert
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")  # --strict counts warnings of mkdocs.* loggers

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)
_UNKNOWN = re.compile(r"\\[A-Za-z]+")
_ARG = re.compile(r"\\arg(?![A-Za-z])")  # the converter does not know \arg


def on_page_content(text: str, *, page: Page, **_: object) -> str:
    """Return the page with formulas as MathML; a formula that cannot be converted is a warning."""

    def as_mathml(found: re.Match[str]) -> str:
        latex = _ARG.sub(r"\\operatorname{arg}", html.unescape(found["latex"]))
        try:
            mathml = convert(latex, display="inline" if found["kind"] == "(" else "block")
        except Exception as e:  # any parser error: warn with page and formula, and continue
            log.warning("%s: the formula %r cannot be read: %r", page.file.src_uri, latex, e)
            return found[0]
        if unknown := _UNKNOWN.findall(html.unescape(mathml)):
            log.warning("%s: %s is unknown in %r", page.file.src_uri, unknown, latex)
        return mathml

    return _FORMULA.sub(as_mathml, text)
