"""The table of what the default policy does after an iteration, from its ordered conditions and actions."""

from docs.site.markdown import table
from gpuenergyd_policies.bubble_aware.decisions import DECISIONS


def decisions() -> str:
    """Return the table of conditions and what follows, in the order in which they are tried."""
    rows = [(f"{number}", decision.when, decision.then) for number, decision in enumerate(DECISIONS, start=1)]
    return table(("", "if", "then"), rows)
