"""A study's table: its entries, its layout as text and LaTeX, and its picture."""
