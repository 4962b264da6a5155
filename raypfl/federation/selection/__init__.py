"""Which clients take part in a round, by what is known of all clients and by what they have reported."""

from raypfl.federation.selection.base import SELECTIONS, Candidates, Reports, Selection, SelectionState
from raypfl.federation.selection.oort import Oort

__all__ = ["SELECTIONS", "Candidates", "Oort", "Reports", "Selection", "SelectionState"]
