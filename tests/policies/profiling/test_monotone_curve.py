"""The monotone curve is scipy's, at a fraction of its time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from gpuenergyd_policies.profiling.monotone_curve import MonotoneCurve

_values = st.floats(-3.0, 3.0, allow_subnormal=False)


@given(
    widths=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=9),
    data=st.data(),
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_equals_scipys_interpolation(widths: list[float], data: st.DataObject, shares: list[float]) -> None:
    """Any points, monotone or not, flat parts included."""
    x = np.concatenate([[0.0], np.cumsum(widths)])
    y = data.draw(st.lists(st.one_of(_values, st.sampled_from([0.0, 1.0])), min_size=len(x), max_size=len(x)))
    at = np.minimum(np.array(shares) * x[-1], x[-1])
    found = MonotoneCurve.through(x.tolist(), y).at(at)
    assert found == pytest.approx(PchipInterpolator(x, np.array(y))(at), abs=1e-9)


@given(y=st.lists(_values, min_size=2, max_size=8), shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20))
def test_a_falling_curve_never_rises(y: list[float], shares: list[float]) -> None:
    """Between falling points the values fall too: no clock looks slower than a lower one."""
    falling = sorted(y, reverse=True)
    at = np.sort(np.array(shares)) * (len(y) - 1)
    values = MonotoneCurve.through([float(k) for k in range(len(y))], falling).at(at)
    assert np.all(np.diff(values) <= 1e-12)
