"""Measured clock changes on disk, and what `doctor --measure` found, so that a restarted daemon knows its GPUs.

All of it depends on the GPU model and the driver, and is kept by both; what was measured under another driver version
is not used.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.core.host.measured_gpu import MeasuredGpu
from gpuenergyd.core.pipeline.switching import ObservedSwitch
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_BYTES = 16 * 2**20
_MAX_MODELS = 64
MAX_KEPT = 512
"""Newest changes kept for each GPU model."""


@dataclass(frozen=True, slots=True)
class SavedSwitches:
    """Measured clock changes on GPUs of one model under one driver version, oldest first."""

    model_name: str
    max_sm_clock_mhz: int
    driver_version: str
    switches: tuple[ObservedSwitch, ...]

    def is_of(self, model_name: str, max_sm_clock_mhz: int) -> bool:
        """Return whether these changes were measured on such a GPU."""
        return (self.model_name, self.max_sm_clock_mhz) == (model_name, max_sm_clock_mhz)


@dataclass(frozen=True, slots=True)
class _Head:
    version: int


@dataclass(frozen=True, slots=True)
class _SavedModels:
    version: int
    models: tuple[SavedSwitches, ...]
    measured_gpus: tuple[MeasuredGpu, ...] = ()


class SwitchingFile:
    """The file of all GPU models; file errors are logged, never raised."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.measured_gpus: tuple[MeasuredGpu, ...] = ()
        """What was read, and what is saved with the changes."""
        self._written = b""

    def read(self) -> tuple[SavedSwitches, ...]:
        """Return what earlier daemons measured; empty if there is no usable file."""
        try:
            with self._path.open("rb") as file:
                body = file.read(_MAX_BYTES + 1)
            saved = _decoded(body)
        except FileNotFoundError:
            return ()
        except (OSError, ProtocolError) as error:
            log.warning("cannot read %s: %s; switch latencies are measured anew", self._path, error)
            return ()
        self._written, self.measured_gpus = body, saved.measured_gpus
        return saved.models

    def save(self, models: Iterable[SavedSwitches]) -> None:
        """Replace the file if the changes differ from those in it; the newest `MAX_KEPT` of each model are kept."""
        kept = tuple(replace(model, switches=model.switches[-MAX_KEPT:]) for model in models)[:_MAX_MODELS]
        body = encode(_SavedModels(_VERSION, kept, self.measured_gpus[-_MAX_MODELS:]))
        if body == self._written or not (kept or self.measured_gpus or self._written):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            replace_file(self._path, body)
        except OSError as error:
            log.warning("cannot save switch latencies: %s: %s", self._path, error.strerror)
        else:
            self._written = body


def _decoded(body: bytes) -> _SavedModels:
    """Return the content of a file; raise ProtocolError if it is damaged, or of another version of the format."""
    version = decode(body, _Head, max_bytes=_MAX_BYTES).version
    if version != _VERSION:
        raise ProtocolError(f"version {version}; this program reads {_VERSION}")
    return decode(body, _SavedModels, max_bytes=_MAX_BYTES)
