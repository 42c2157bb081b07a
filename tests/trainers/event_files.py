"""Scalars in TensorBoard's event files, read by TensorBoard itself."""

import importlib
from pathlib import Path


def logged_scalars(folder: Path) -> dict[str, float]:
    """Return the last value of each scalar in the event files under a folder."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, float] = {}
    for path in sorted(folder.rglob("events.out.*")):
        events = module.EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] = events.Scalars(name)[-1].value
    return found
