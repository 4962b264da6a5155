"""How several methods stand on one test."""

from raypfl.results.ranking.standings import Standing, standings_of_groups

__all__ = ["Standing", "standings_of_groups"]
