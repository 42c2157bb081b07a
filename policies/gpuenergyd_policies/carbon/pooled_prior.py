"""A pretrained forecast model for any zone: it needs only the zone's last week.

`pooled_prior.npz` holds a ridge regression on shape and dynamics features and three small neural networks on shape
features, fitted by `benchmarks/runs/carbon_prior.py TRACES --out pooled_prior.npz` on public hourly traces up to 2023
(Electricity Maps, ODbL 1.0; EIA; ENTSO-E); it holds coefficients, no data. Their weighted mean is the forecast. A
replay of one of those zones before TRAINED_UNTIL_AT tests nothing: those years are training data.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np

from gpuenergyd_policies.carbon.features import Array, FilledHistory, Origins, crossed_shape_features, shape_features
from gpuenergyd_policies.carbon.recent_dynamics import dynamics_features

_FILE = Path(__file__).with_name("pooled_prior.npz")
_CHUNK_ROWS = 2048
TRAINED_UNTIL_AT = datetime(2024, 1, 1, tzinfo=UTC)
TRAINED_ZONES = frozenset({"AU-SA", "CA-ON", "CISO", "DE", "ES", "GB", "KR", "PJM"})


@dataclass(frozen=True, slots=True)
class Network:
    """Two hidden layers with a parallel linear path; weights in PyTorch's layout."""

    linear: tuple[Array, Array]
    layers: tuple[tuple[Array, Array], ...]

    def __call__(self, features: Array) -> Array:
        """Return corrections of the naive forecast."""
        hidden = features
        for weight, bias in self.layers[:-1]:
            hidden = _gelu(hidden @ weight.T + bias)
        weight, bias = self.layers[-1]
        result: Array = hidden @ weight.T + bias + features @ self.linear[0].T + self.linear[1]
        return result


@dataclass(frozen=True, slots=True)
class PooledPrior:
    """The fitted models, and the scaling of their inputs."""

    ridge: Array
    mean: Array
    deviation: Array
    networks: tuple[Network, ...]
    ridge_weight: float

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return 72 hours for each origin, in the unit of the history; origins are >= 168."""
        return np.concatenate(
            [
                self._predict_few(history, origins[k : k + _CHUNK_ROWS])
                for k in range(0, max(1, len(origins)), _CHUNK_ROWS)
            ]
        )

    def _predict_few(self, history: FilledHistory, origins: Origins) -> Array:
        shapes = shape_features(history, origins)
        crossed = crossed_shape_features(shapes.features)
        dynamics = dynamics_features(history.values, origins, shapes)
        correction = self.ridge_weight * (np.concatenate([crossed, dynamics], axis=1) @ self.ridge)
        scaled = (shapes.features - self.mean) / self.deviation
        for network in self.networks:
            correction += (1.0 - self.ridge_weight) / len(self.networks) * network(scaled)
        return shapes.to_intensity(shapes.naive + correction)


@cache
def shipped_prior() -> PooledPrior:
    """Return the pooled prior of this package."""
    return read_prior(_FILE)


def read_prior(path: Path) -> PooledPrior:
    """Return a pooled prior from a file."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name].astype(np.float64) for name in stored.files}
    num_networks = int(arrays["num_networks"])
    networks = tuple(
        Network(
            linear=(arrays[f"{n}.l.weight"], arrays[f"{n}.l.bias"]),
            layers=tuple((arrays[f"{n}.{layer}.weight"], arrays[f"{n}.{layer}.bias"]) for layer in "abc"),
        )
        for n in range(num_networks)
    )
    return PooledPrior(arrays["ridge"], arrays["mean"], arrays["deviation"], networks, float(arrays["ridge_weight"]))


def _gelu(x: Array) -> Array:
    """Return the Gaussian error linear unit (tanh approximation)."""
    result: Array = 0.5 * x * (1.0 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    return result
