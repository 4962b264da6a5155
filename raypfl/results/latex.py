"""Tables as LaTeX, which needs the package ``booktabs`` and no other."""

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
_NUMBER = re.compile(r"(?<![\w.,])[+-][\d,]*\.?\d+")

Block = tuple[str, Sequence[Sequence[str]]]
"""A title above rows, which may be empty, and the rows, each a LaTeX text for each column."""


def escaped(text: str) -> str:
    """Plain text as LaTeX."""
    return "".join(_COMMANDS.get(character, character) for character in text)


def number(text: str) -> str:
    """A number or several, as printed in plain text: with signs and ± as in formulas."""
    return _NUMBER.sub(lambda signed: f"${signed[0]}$", escaped(text.replace("±", " ± ")))


def table(headings: Sequence[str], blocks: Sequence[Block], caption: str, words: int = 1) -> str:
    """A ``table`` environment.

    Parameters
    ----------
    headings : LaTeX. caption : plain text. words : columns of words, on the left, before those of numbers.
    """
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escaped(caption)}}}",
        rf"  \begin{{tabular}}{{{'l' * words}{'r' * (len(headings) - words)}}}",
        r"    \toprule",
        f"    {_row(headings)}",
    ]
    for title, rows in blocks:
        lines.append(r"    \midrule")
        lines += [rf"    \multicolumn{{{len(headings)}}}{{l}}{{\emph{{{title}}}}} \\"] if title else []
        lines += [f"    {_row(row)}" for row in rows]
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"
