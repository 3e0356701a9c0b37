"""The governor on a real database: a shop's checkout runs while overdue holds are cleared, and things go wrong.

Path of a run: `course` names what happens and who clears, `run` plays it, `checkout` is the shop, `faults` are what
goes wrong, `aimd` is a rival law under the same worker, `judge` compares, `view` shows.
"""

from bench.governed.run import measure
from bench.governed.view import view

__all__ = ["measure", "view"]
