"""No stored saving lies above its proven bound: planned, simulated or measured, with any waiting power."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from benchmarks.report.results import read_result

_ROUNDING = 1e-4
"""Figures of running jobs are stored with four decimals."""
_BOUNDS = {
    "any_order_bound_ratio": ("saving_ratio", "ahead_ratio", "plain_ratio"),
    "plain_bound_ratio": ("plain_ratio",),
    "bound_ratio": ("saving_low",),  # measured: with an interval
    "bound_ratio_0_ms": ("saving_ratio_0_ms", "kept_saving_ratio_0_ms"),
    "bound_ratio_14_ms": ("saving_ratio_14_ms", "kept_saving_ratio_14_ms"),
    "bound_ratio_25_ms": ("saving_ratio_25_ms", "kept_saving_ratio_25_ms"),
}
"""Savings by the bound that stands beside them in the same row."""


def bounded(figures: Any, where: str) -> Iterator[tuple[str, float, float]]:
    """Yield (place, saving, bound) of all rows that have both."""
    if isinstance(figures, Mapping):
        for bound, savings in _BOUNDS.items():
            for saving in savings:
                if figures.get(bound) is not None and figures.get(saving) is not None:
                    yield f"{where}: {saving} under {bound}", figures[saving], figures[bound]
        for name, value in figures.items():
            yield from bounded(value, f"{where}.{name}")
    elif isinstance(figures, list):
        for at, value in enumerate(figures):
            yield from bounded(value, f"{where}[{at}]")


@pytest.mark.parametrize("name", ["orders", "emulation", "schedules"])
def test_no_stored_saving_is_above_its_bound(name: str) -> None:
    found = list(bounded(read_result(name).figures, name))

    assert found
    assert [place for place, saving, bound in found if saving > bound + _ROUNDING] == []
