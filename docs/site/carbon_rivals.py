"""Carbon forecasts beside published ones, from the result of the benchmark `carbon-published`."""

from statistics import mean

from benchmarks.report.results import read_result
from docs.site.markdown import table

_PUBLISHED = (
    (
        "DACF (2022)",
        "CISO, DE, PJM; direct emission factors",
        "7.4, 9.1 and 3.3 %",
        "-",
        "weather, generation forecasts",
    ),
    ("CarbonX (2025)", "13 grids of CarbonCast", "9.6 % (average)", "95 %", "past intensities; foundation model"),
    ("CarbonX (2025), grids it was not trained on", "214 grids", "15.8 % (average)", "-", "past intensities"),
    ("EnsembleCI (2025)", "11 grids", "19.6 % lower than CarbonCast's", "-", "weather, generation"),
)


def carbon_rivals() -> str:
    """Return the table; a sentence before the benchmark has a result."""
    figures = read_result("carbon-published").figures
    if figures is None:
        return "Not measured yet."
    zones = figures["zones"]
    names = ", ".join(zone["zone"] for zone in zones)
    inside = [zone["interval_coverage_ratio"] for zone in zones]
    by_day = zip(*(zone["mape_ratio_by_day"] for zone in zones), strict=True)
    first, second, third = (f"{100 * mean(day):.1f}" for day in by_day)
    by_zone = ", ".join(f"{100 * zone['mape_ratio_by_day'][0]:.1f}" for zone in zones)
    ours = (
        "gpuenergyd",
        f"{names}; July to December 2021",
        f"first day {first} % ({by_zone}), second {second} %, third {third} %",
        f"{100 * min(inside):.1f} to {100 * max(inside):.1f} %, mean {100 * mean(inside):.1f} %",
        "past intensities",
    )
    naive = f"{100 * mean(zone['mape_yesterday_ratio'] for zone in zones):.1f} %"
    return table(
        ("forecast", "grids", "MAPE", "hours inside the 95 % interval", "knows"),
        [ours, ("yesterday's values", "the same", naive, "-", "past intensities"), *_PUBLISHED],
    )
