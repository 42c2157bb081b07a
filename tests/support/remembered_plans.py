"""The bubble-aware policy with plans remembered for views seen before in this test process.

The policy decides from the view alone (a test of the control loop checks it), and many virtual trainings are equal
until something happens to them. Their first plans are then computed once.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.policy import BubbleAware

_MAX_OBSERVATIONS = 60
"""Views of more iterations are not compared: the comparison would cost more than most of their plans."""
_MAX_PARTS = 20_000
"""Parts of views whose digests are kept."""


class RememberedBubbleAware(BubbleAware):
    """A policy that remembers the plans of the first iterations by their view."""

    _plans: ClassVar[dict[bytes, ClockPlan]] = {}
    _digests: ClassVar[dict[int, tuple[Any, bytes]]] = {}
    """Digests by the identity of a part, with the part itself, so that no other one gets its identity."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the policy's plan, from memory for a view seen before."""
        if len(view.observations) > _MAX_OBSERVATIONS:
            return super().next_plan(view)
        key = self._view_digest(view)
        if key not in self._plans:
            self._plans[key] = super().next_plan(view)
        return self._plans[key]

    def _view_digest(self, view: JobView) -> bytes:
        """Return a digest of a view's content; most parts are those of an earlier view of the same training."""
        digest = hashlib.sha256()
        for value in (getattr(view, field.name) for field in fields(view)):
            parts = value if isinstance(value, tuple) else (value,)
            digest.update(b"%d " % len(parts))
            for part in parts:
                digest.update(self._part_digest(part))
        return digest.digest()

    def _part_digest(self, part: Any) -> bytes:
        if isinstance(part, Mapping):  # may be changed in place
            return _digest(part)
        if id(part) not in self._digests:
            if len(self._digests) > _MAX_PARTS:
                self._digests.clear()
            self._digests[id(part)] = (part, _digest(part))
        return self._digests[id(part)][1]


def _digest(part: Any) -> bytes:
    data = io.BytesIO()
    pickler = pickle.Pickler(data)
    pickler.fast = True  # equal parts have equal bytes, whichever of their own parts are shared objects
    pickler.dump(part)
    return hashlib.sha256(data.getbuffer()).digest()
