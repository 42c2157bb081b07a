"""Power of waiting by clock for `gpuenergyd plan`: from a CSV file, or assumed to be that of a GPU model.

Plugins provide assumed powers as entry points in the group `gpuenergyd.waiting_powers`: functions without parameters
that return, by key of the GPU model, pairs (clock in MHz, power in W) for each supported clock.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeAlias

from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.errors import UsageError
from gpuenergyd.wire.profile_files import read_waiting_power_file

AssumedWaitingPowers: TypeAlias = Callable[[], Mapping[str, Sequence[tuple[int, float]]]]


def given_waiting_power(text: str) -> tuple[WaitingPower, tuple[str, ...]]:
    """Return the curve that `--waiting-power` names, and a note if it is assumed.

    Raises:
        UsageError: the text names neither a file nor a GPU model.
        ProfileError: the file is invalid.
    """
    path = Path(text)
    if path.exists():
        return read_waiting_power_file(path), ()
    assumed = _assumed_waiting_powers()
    if text not in assumed:
        models = ", ".join(sorted(assumed)) or "none installed"
        raise UsageError(f"--waiting-power {text}: neither a file nor a GPU model; models: {models}")
    curve = waiting_power(assumed[text], where=text, is_assumed=True)
    note = (
        f"the power of waiting by clock is assumed, as of a simulated {text}: {curve.powers_w[-1]:.1f} W at"
        f" {curve.clocks_mhz[-1]} MHz, {curve.powers_w[0]:.1f} W at {curve.clocks_mhz[0]} MHz"
    )
    return curve, (note,)


def _assumed_waiting_powers() -> Mapping[str, Sequence[tuple[int, float]]]:
    found: dict[str, Sequence[tuple[int, float]]] = {}
    for point in entry_points(group="gpuenergyd.waiting_powers"):
        waiting_powers: AssumedWaitingPowers = point.load()
        found |= waiting_powers()
    return found
