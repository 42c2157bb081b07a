"""Intensities from a generation mix, with life-cycle factors per plant type."""

from collections.abc import Mapping
from types import MappingProxyType

COAL, GAS, OIL, OTHER = 820.0, 490.0, 650.0, 700.0
BIOMASS, GEOTHERMAL, HYDRO, NUCLEAR, WIND, SOLAR = 230.0, 38.0, 24.0, 12.0, 11.0, 45.0
"""Life-cycle g/kWh: medians of the IPCC's fifth assessment report, annex III; `OTHER` is for unlisted types."""

ENTSOE_FACTORS: Mapping[str, float] = MappingProxyType({
    "B01": BIOMASS, "B02": COAL, "B03": GAS, "B04": GAS, "B05": COAL, "B06": OIL, "B07": OIL, "B08": COAL,
    "B09": GEOTHERMAL, "B10": HYDRO, "B11": HYDRO, "B12": HYDRO, "B13": OTHER, "B14": NUCLEAR, "B15": OTHER,
    "B16": SOLAR, "B17": OTHER, "B18": WIND, "B19": WIND, "B20": OTHER,
})  # fmt: skip
EIA_FACTORS: Mapping[str, float] = MappingProxyType({
    "NG": GAS, "COL": COAL, "NUC": NUCLEAR, "WAT": HYDRO, "WND": WIND, "SUN": SOLAR, "OIL": OIL, "OTH": OTHER,
})  # fmt: skip


def mix_intensity(energy: Mapping[str, float], factors: Mapping[str, float]) -> float | None:
    """Return the intensity of a mix; negative generation (pumping) counts as 0; None without generation."""
    produced = {kind: max(0.0, amount) for kind, amount in energy.items()}
    total = sum(produced.values())
    if total <= 0:
        return None
    return sum(amount * factors.get(kind, OTHER) for kind, amount in produced.items()) / total
