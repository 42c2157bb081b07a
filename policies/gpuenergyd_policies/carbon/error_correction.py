"""Correction of a forecast by its last error, for zones whose forecast errors persist from hour to hour.

Theory of operation. The error of the last hour is known when the next forecast is made. If a share r of an error
persists in the next one, and changes in the grid persist, the expected error k hours ahead is r + r^2 + ... + r^k of
the last one, with a decay. The share is the correlation of consecutive errors, shrunk towards the usual value of other
zones with the weight of 24 errors: as many as there are after 8 days of history; later there are four weeks of them.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.carbon.features import Array

USUAL_PERSISTENCE_RATIO = 0.3
"""Persistence of the errors of the pooled prior alone, in zones it was not trained on, before 2024."""
_USUAL_WEIGHT_ERRORS = 24
"""Weight of the usual persistence, as a number of errors."""
_MAX_PERSISTENCE_RATIO = 0.9
_FADING_RATIO = 0.95
_LARGEST_ERRORS = 3.0
"""Limit of an error, in mean absolute errors: a larger one may come from a wrong value of the source."""


@dataclass(frozen=True, slots=True)
class ErrorCorrection:
    """Persistence of errors, and their mean absolute size (None: unknown)."""

    persistence_ratio: float
    mean_error: float | None = None

    @classmethod
    def fitted(cls, errors: Array, usual_persistence_ratio: float) -> "ErrorCorrection":
        """Return the correction fitted to consecutive one-hour errors; NaN where an error is unknown."""
        pairs = errors[1:] * errors[:-1]
        pairs, known = pairs[np.isfinite(pairs)], errors[np.isfinite(errors)]
        if not len(known) or not np.any(known):
            return cls(usual_persistence_ratio)
        usual = _USUAL_WEIGHT_ERRORS * float((known**2).mean())
        share = (float(pairs.sum()) + usual * usual_persistence_ratio) / (
            len(pairs) * usual / _USUAL_WEIGHT_ERRORS + usual
        )
        return cls(min(max(share, 0.0), _MAX_PERSISTENCE_RATIO), float(np.abs(known).mean()))

    def expected(self, last_errors: Array, num_hours: int) -> Array:
        """Return the expected errors, one row per last error, to be added to forecasts; 0 where an error is NaN."""
        known = np.nan_to_num(last_errors, nan=0.0, posinf=0.0, neginf=0.0)
        if self.mean_error is not None:
            limit = _LARGEST_ERRORS * self.mean_error
            known = np.clip(known, -limit, limit)
        ahead = np.arange(num_hours)
        returning = np.cumsum(self.persistence_ratio ** (ahead + 1)) * _FADING_RATIO**ahead
        result: Array = known[:, None] * returning
        return result
