"""Power of waiting by clock for `gpuenergyd plan`: from a CSV file, or assumed as that of a simulated GPU model."""

from pathlib import Path

from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.drivers.device_model import blocking_power_w
from gpuenergyd.gpu.drivers.device_parameters import MODELS
from gpuenergyd.wire.profile_files import read_waiting_power_file


def given_waiting_power(text: str) -> tuple[WaitingPower, tuple[str, ...]]:
    """Return the curve that `--waiting-power` names, and a note if it is assumed.

    Raises:
        UsageError: neither a file nor a model.
        ProfileError: the file is invalid.
    """
    model = MODELS.get(text)
    if model is not None:
        points = ((mhz, blocking_power_w(model, mhz)) for mhz in model.supported_sm_clocks_mhz)
        curve = waiting_power(points, where=text, is_assumed=True)
        note = (
            f"the power of waiting by clock is assumed, as of a simulated {text}: {curve.powers_w[-1]:.1f} W at"
            f" {curve.clocks_mhz[-1]} MHz, {curve.powers_w[0]:.1f} W at {curve.clocks_mhz[0]} MHz"
        )
        return curve, (note,)
    path = Path(text)
    if not path.exists():
        raise UsageError(f"--waiting-power {text}: neither a file nor a GPU model; models: {', '.join(sorted(MODELS))}")
    return read_waiting_power_file(path), ()
