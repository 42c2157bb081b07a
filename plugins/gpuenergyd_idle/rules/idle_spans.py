"""How long a GPU must have been idle before lowering it is worth the time that the next wake loses.

Theory of operation. A wake loses about the same time after each idle span, and a span saves the more the longer it is.
So the allowance of lost time is best spent on the longest spans, whose length is not known when they begin. The rule
is a threshold: a span that has lasted as long as it is lowered. The spans of the last week tell how many exceed a
threshold in a day; the least one is taken whose wakes the account can pay. Where wakes are rare that is `after_s`, and
with requests each minute it is longer than the usual pause, so that only nights are lowered. As the account empties the
threshold rises. Before there is a history, a quarter of a day is assumed in which pauses are as frequent as in a
notebook, and half as many are twice as long.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from gpuenergyd_idle.rules.lost_time import DAY_S, LostTimeAccount

_KEPT_S = 7 * DAY_S
_MAX_SPANS = 4096
_ASSUMED_DAYS, _ASSUMED_SPANS_A_DAY = 0.25, 100.0
"""History that is assumed beside the own one, and its spans of `after_s` or longer."""


@dataclass(slots=True)
class IdleSpans:
    """The idle spans of one GPU that lasted `after_s` at least."""

    after_s: float
    since_s: float
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_SPANS))
    """End and length of each idle span."""

    def record(self, end_s: float, length_s: float) -> None:
        if length_s >= self.after_s:
            self._spans.append((end_s, length_s))
        while self._spans and self._spans[0][0] < end_s - _KEPT_S:
            self._spans.popleft()

    def threshold_s(self, at_s: float, account: LostTimeAccount) -> float:
        """Return how long the present span must have lasted."""
        begin_s = max(self.since_s, at_s - _KEPT_S)
        if len(self._spans) == _MAX_SPANS:
            begin_s = max(begin_s, self._spans[0][0])
        affordable = account.wakes_a_day(at_s) * ((at_s - begin_s) / DAY_S + _ASSUMED_DAYS)
        assumed_s = _ASSUMED_DAYS * _ASSUMED_SPANS_A_DAY * self.after_s
        lengths = [*sorted((length_s for _, length_s in self._spans), reverse=True), self.after_s]
        # Above lengths[k] there are k spans of the own history, and assumed_s / threshold of the assumed one.
        return min(
            (max(length_s, assumed_s / (affordable - k)) for k, length_s in enumerate(lengths) if k < affordable),
            default=math.inf,
        )
