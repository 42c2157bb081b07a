"""Cases of parametrized tests that only the thorough run has: `make test-thorough`."""

from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """Return marked cases; a tuple has the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]
