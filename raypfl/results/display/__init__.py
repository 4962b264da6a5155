"""What runs show: their progress and their end in a terminal or a notebook, and tables as LaTeX."""
