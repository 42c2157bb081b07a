"""The reference policy of the examples, imported from its package, which is not installed with this project."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "reference_policy"
sys.path.insert(0, str(PACKAGE))

from reference_policy import ReferencePolicy  # noqa: E402  found by the line above

__all__ = ["PACKAGE", "ReferencePolicy"]
