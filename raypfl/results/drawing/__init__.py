"""How everything is drawn: with Matplotlib, on a figure that becomes a PNG file or an SVG element of a report.

Pictures and reports draw with the same functions; only :mod:`raypfl.results.drawing.canvas` knows which of the two
it is. A report has SVG rather than embedded PNG files for its size, its text that scales and can be searched, and its
colours, which follow the browser's light or dark mode and fade when the pointer is on another method.
"""

from raypfl.results.drawing.comparison import draw

__all__ = ["draw"]
