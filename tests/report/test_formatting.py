"""Values have units of their magnitude; missing values are marked."""

import pytest

from gpuenergyd.report import formatting as figures
from gpuenergyd.report.terminal.status_lines import grid_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.time_text(0.0123), "12.3 ms"),
        (figures.time_text(0.9999), "1.000 s"),
        (figures.time_text(1.2345), "1.234 s"),
        (figures.time_text(45.67), "45.7 s"),
        (figures.time_text(125.0), "2 min 5 s"),
        (figures.time_text(7260.0), "2 h 1 min"),
        (figures.energy_text(812.34), "812.3 J"),
        (figures.energy_text(12_400.0), "12.4 kJ"),
        (figures.energy_text(3.6e6), "1.00 kWh"),
        (figures.ratio_text(0.1234), "+12.3 %"),
        (figures.ratio_text(-0.00001), "+0.0 %"),
        (figures.difference_text(-20.0), "20.0 J less"),
        (figures.difference_text(20.0), "20.0 J more"),
        (figures.power_text(251.4), "251 W"),
        (figures.clock_text(1410), "1410 MHz"),
        (figures.age_text(0.16), "0.2 s"),
        (figures.age_text(45.0), "45 s"),
        (figures.age_text(185.0), "3 min 5 s"),
    ],
)
def test_values_are_written_in_a_unit_of_their_magnitude(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    "write",
    [
        figures.time_text,
        figures.energy_text,
        figures.ratio_text,
        figures.difference_text,
        figures.power_text,
        figures.clock_text,
        figures.temperature_text,
        figures.age_text,
    ],
)
def test_a_missing_value_is_never_shown_as_zero(write: object) -> None:
    assert callable(write)
    assert write(None) == figures.MISSING
    assert "0" not in figures.MISSING


def test_the_skill_of_forecasts_has_the_sign_of_the_json_fields_everywhere() -> None:
    skill = {"skill_1h_ratio": 0.31, "skill_6h_ratio": -0.02, "skill_24h_mean_ratio": 0.1}
    text = (
        "forecast skill (error reduced against the best naive forecast): 1 h +31.0 %, 6 h -2.0 %, mean of 24 h +10.0 %"
    )

    assert figures.skill_text(**skill) == text
    grid = {
        "zone": "GB", "value": 210.0, "unit": "g/kWh", "basis": "live", "age_s": 60.0, "replayed_hour_s": None,
        "forecast_model": "pooled-prior", "live_skill": {**skill, "num_origins": 40}, "timing_value": None,
    }  # fmt: skip
    assert str(grid_lines(grid)[0]) == "zone GB: 210 g/kWh (live, 60 s old)"
    assert str(grid_lines({**grid, "basis": "fixed", "age_s": None})[0]) == "zone GB: 210 g/kWh (fixed)"
    assert str(grid_lines(grid)[1]) == f"forecast: pooled-prior; {text} (40 forecasts)"
