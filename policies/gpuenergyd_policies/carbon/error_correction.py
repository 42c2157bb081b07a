"""What a forecaster's last error says of its next ones: where errors go on, the next forecast leans against them.

Theory of operation. How far the last hour came out above its forecast is known when the next forecast is made. Where a
share r of an error returns in the next one, and changes in the grid stay, k hours ahead r + r^2 + ... + r^k of it is to
be expected, fading as every deviation does. The share is the errors' own correlation from hour to hour, drawn towards
what was usual elsewhere by a day's worth of errors: after 8 days of history there are 24 of them, later four weeks.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.carbon.features import Array

USUAL_SHARE_RATIO = 0.3
"""What returns of an error of forecasts by the prior alone, in zones it does not know, before 2024."""
_USUAL_WEIGHT_ERRORS = 24
_LARGEST_SHARE_RATIO = 0.9
_FADING_RATIO = 0.95
_LARGEST_ERRORS = 3.0
"""An error beyond so many mean ones is corrected like this one: it may be a false value."""


@dataclass(frozen=True, slots=True)
class ErrorMemory:
    """How much of an error returns, and how large errors usually are (None: not known)."""

    share_ratio: float
    mean_error: float | None = None

    @classmethod
    def fitted(cls, errors: Array, usual_share_ratio: float) -> "ErrorMemory":
        """Return what consecutive one-hour errors show; NaN where an error is not known."""
        pairs = errors[1:] * errors[:-1]
        pairs, known = pairs[np.isfinite(pairs)], errors[np.isfinite(errors)]
        if not len(known) or not np.any(known):
            return cls(usual_share_ratio)
        usual = _USUAL_WEIGHT_ERRORS * float((known**2).mean())
        share = (float(pairs.sum()) + usual * usual_share_ratio) / (len(pairs) * usual / _USUAL_WEIGHT_ERRORS + usual)
        return cls(min(max(share, 0.0), _LARGEST_SHARE_RATIO), float(np.abs(known).mean()))

    def expected(self, last_errors: Array, num_hours: int) -> Array:
        """Return what is to be added to forecasts after these last errors, one row each; 0 where an error is NaN."""
        known = np.nan_to_num(last_errors, nan=0.0, posinf=0.0, neginf=0.0)
        if self.mean_error is not None:
            limit = _LARGEST_ERRORS * self.mean_error
            known = np.clip(known, -limit, limit)
        ahead = np.arange(num_hours)
        returning = np.cumsum(self.share_ratio ** (ahead + 1)) * _FADING_RATIO**ahead
        result: Array = known[:, None] * returning
        return result
