"""Number of hypothesis examples: a tenth in the usual run, all in the thorough one."""

from hypothesis import settings

THOROUGH = 100
"""Examples of a test that asks for no number of its own, in the thorough run."""
USUAL = 10
"""As above, in the usual run."""
_LEAST = 2


def examples(thorough: int) -> int:
    """Return the number of examples under the present profile for a test with `thorough` in the thorough run."""
    return max(min(_LEAST, thorough), thorough * settings().max_examples // THOROUGH)
