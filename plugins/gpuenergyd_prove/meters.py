"""External power meters of a proof: Redfish, IPMI DCMI, a Prometheus query, and the kernel's CPU counters.

Redfish (DMTF DSP0266): `PowerControl[0].PowerConsumedWatts` of a chassis' Power resource, or `PowerWatts.Reading` of
its EnvironmentMetrics. IPMI: `ipmitool dcmi power reading`. Prometheus: an instant query that returns one value, in
watts.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpuenergyd.errors import GpuUnsupportedError, UsageError
from gpuenergyd.powercap import POWERCAP, PowercapCounter, component_counters
from gpuenergyd_carbon.sources.web import SourceError, Web, WebLimits
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.measurements import PowerSample
from gpuenergyd_prove.proof.outside_meter import COVERS
from gpuenergyd_prove.proof.registration import MeterFacts

_LIMITS = WebLimits(connect_s=1.0, read_s=2.0, total_s=3.0, max_retries=0)
_DCMI = ("ipmitool", "dcmi", "power", "reading")
_DCMI_LINE = re.compile(r"Instantaneous power reading:\s*(\d+)\s*Watts")
_UJ_PER_J = 1e6
USER_VARIABLE, PASSWORD_VARIABLE = "REDFISH_USER", "REDFISH_PASSWORD"


class Meter(Protocol):
    """A meter that measures power outside the GPUs."""

    @property
    def facts(self) -> MeterFacts:
        """The description of the meter that is registered."""
        ...

    def read(self) -> PowerSample | None:
        """Return a reading; None if there is no new one.

        Raises:
            ProofError: it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class RedfishMeter:
    """The power of a chassis from its management controller."""

    facts: MeterFacts
    url: str
    web: Web = field(default_factory=lambda: Web(_LIMITS))
    now_s: Callable[[], float] = time.time

    def read(self) -> PowerSample | None:
        """Return a reading, dated at the middle of the request."""
        user, password = os.environ.get(USER_VARIABLE), os.environ.get(PASSWORD_VARIABLE, "")
        begun_s = self.now_s()
        reply = _json(self.web, "Redfish", self.url, basic_auth=(user, password) if user is not None else None)
        at_s = (begun_s + self.now_s()) / 2
        control = reply.get("PowerControl")
        sensor = reply.get("PowerWatts")
        if isinstance(control, list) and control and isinstance(control[0], dict):
            return PowerSample(at_s, _watts("Redfish", control[0].get("PowerConsumedWatts")))
        return PowerSample(at_s, _watts("Redfish", sensor.get("Reading") if isinstance(sensor, dict) else None))


@dataclass(frozen=True, slots=True)
class PrometheusMeter:
    """An instant query of a Prometheus server, for PDUs, IPMI exporters and the like."""

    facts: MeterFacts
    url: str
    query: str
    web: Web = field(default_factory=lambda: Web(_LIMITS))
    _last: list[float] = field(default_factory=list)

    def read(self) -> PowerSample | None:
        """Return the value, dated by the server."""
        url = f"{self.url.rstrip('/')}/api/v1/query"
        reply = _json(self.web, "Prometheus", url, parameters={"query": self.query})
        data = reply.get("data")
        result = data.get("result") if isinstance(data, dict) else None
        if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], dict):
            count = len(result) if isinstance(result, list) else "no"
            raise ProofError(f"Prometheus: the query gives {count} series; it must give one, in watts")
        value = result[0].get("value")
        if not isinstance(value, list) or len(value) != 2:
            raise ProofError("Prometheus: the query gives no instant value")
        at_s = _watts("Prometheus", value[0])
        if self._last and at_s <= self._last[0]:
            return None
        self._last[:] = [at_s]
        return PowerSample(at_s, _watts("Prometheus", value[1]))


@dataclass(frozen=True, slots=True)
class IpmiMeter:
    """The node's power from IPMI DCMI, read with ipmitool."""

    facts: MeterFacts
    command: tuple[str, ...] = _DCMI
    now_s: Callable[[], float] = time.time

    def read(self) -> PowerSample | None:
        """Return a reading, dated at the middle of the call."""
        begun_s = self.now_s()
        try:
            done = subprocess.run(self.command, capture_output=True, text=True, timeout=5.0, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProofError(f"IPMI: {self.command[0]}: {type(error).__name__}") from None
        found = _DCMI_LINE.search(done.stdout)
        if found is None:
            raise ProofError(f"IPMI: {' '.join(self.command)} printed no instantaneous power reading")
        return PowerSample((begun_s + self.now_s()) / 2, float(found[1]))


@dataclass(slots=True)
class PowercapMeter:
    """Power of CPU packages and memory, from the kernel's energy counters."""

    facts: MeterFacts
    root: Path = POWERCAP
    now_s: Callable[[], float] = time.time
    _counters: Sequence[PowercapCounter] = ()
    _last_s: float | None = None

    def read(self) -> PowerSample | None:
        """Return the mean power since the last reading, dated now; None at the first reading."""
        at_s = self.now_s()
        self._counters = self._counters or component_counters(self.root)
        if not self._counters:
            raise ProofError(f"no CPU energy counters in {self.root}")
        try:
            used_uj = [counter.used_uj() for counter in self._counters]
        except GpuUnsupportedError as error:
            raise ProofError(f"{error}; on many kernels only root can") from None
        since_s, self._last_s = self._last_s, at_s
        if since_s is None or at_s <= since_s:
            return None
        return PowerSample(at_s, sum(used or 0 for used in used_uj) / _UJ_PER_J / (at_s - since_s))


def open_meter(text: str, *, covers: str | None = None, accuracy_ratio: float | None = None) -> Meter:
    """Return the meter that an option names.

    Raises:
        UsageError: the kind, or what it covers, is unknown.
    """
    kind, _, rest = text.partition(":")
    if covers is not None and covers not in COVERS:
        raise UsageError(f"--meter-covers {covers!r}: must be one of {', '.join(COVERS)}")
    facts = MeterFacts(kind, covers or ("components" if kind == "powercap" else "node"), accuracy_ratio)
    if kind == "powercap" and covers not in {None, "components"}:
        raise UsageError("--meter-covers: powercap covers components only: CPU packages and memory")
    match kind, rest:
        case "redfish", url if url.startswith(("http://", "https://")):
            return RedfishMeter(facts, url)
        case "prometheus", address if address.startswith(("http://", "https://")) and "," in address:
            url, _, query = address.partition(",")
            return PrometheusMeter(facts, url, query)
        case "ipmi", "":
            return IpmiMeter(facts)
        case "powercap", "":
            return PowercapMeter(facts)
    raise UsageError(f"--meter {text!r}: must be redfish:URL, prometheus:URL,QUERY, ipmi or powercap")


def _json(web: Web, name: str, url: str, **request: Any) -> Mapping[str, Any]:
    try:
        reply = web.get_json(name, url, **request)
    except SourceError as error:
        raise ProofError(str(error)) from None
    if not isinstance(reply, dict):
        raise ProofError(f"{name}: reply is not a JSON object")
    return reply


def _watts(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ProofError(f"{name}: reply has no number of watts but {value!r}") from None
