"""Tables as LaTeX; the only package that they need is ``booktabs``."""

from __future__ import annotations

import re
from collections.abc import Sequence

PREAMBLE = "% Needs \\usepackage{booktabs}.\n"

_COMMANDS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "…": r"\dots{}",
    "–": "--",
    "’": "'",
}
_NO_LABEL = re.compile(r"[^A-Za-z0-9.]+")
_NUMBER = re.compile(r"(?<![\w.,])[+-][\d,]*\.?\d+(e\d+)?")

TitledRows = tuple[str, Sequence[Sequence[str]]]
"""A title above rows, which may be empty, and the rows, each with a LaTeX text for each column."""


def escaped(text: str) -> str:
    """Return plain text as LaTeX."""
    return "".join(_COMMANDS.get(character, character) for character in text)


def number(text: str) -> str:
    """Return a printed number, such as ``+2.4±0.3``, as LaTeX, with its signs set as in formulas."""
    return _NUMBER.sub(lambda signed: signed_number(signed[0]), escaped(text.replace("±", " ± ")))


def signed_number(text: str) -> str:
    """Return a number such as ``-1,234.5`` or ``+2.9e9`` as a formula, in which a comma would have a space after it."""
    formula = text.replace(",", "{,}").replace("e", r"\mathrm{e}")
    return f"${formula}$"


def table(headings: Sequence[str], parts: Sequence[TitledRows], caption: str, label: str, words: int = 1) -> str:
    """Return a ``table`` environment.

    Parameters
    ----------
    headings : LaTeX.
    caption : plain text.
    label : what the text refers to it by, after ``tab:``; characters that a label cannot have become hyphens.
    words : number of text columns, on the left; the columns after them are numbers.
    """
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escaped(caption)}}}",
        rf"  \label{{tab:{_NO_LABEL.sub('-', label).strip('-')}}}",
        rf"  \begin{{tabular}}{{{'l' * words}{'r' * (len(headings) - words)}}}",
        r"    \toprule",
        f"    {_row(headings)}",
    ]
    for title, rows in parts:
        lines.append(r"    \midrule")
        if title:
            lines.append(rf"    \multicolumn{{{len(headings)}}}{{l}}{{\emph{{{title}}}}} \\")
        lines += [f"    {_row(row)}" for row in rows]

    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"
