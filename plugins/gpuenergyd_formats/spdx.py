"""Training energy as an SPDX 3.0.1 document with the AI profile, to be merged into a model's bill of materials.

https://spdx.github.io/spdx-spec/v3.0.1/model/AI/Classes/EnergyConsumption/ describes the class; the draft of SPDX 3.1
has the same one. What only the publisher of the model knows, such as where it can be downloaded, is NOASSERTION.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gpuenergyd import __version__
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError
from gpuenergyd.report.job import JobReport
from gpuenergyd.report.plugin_formats import ReportedJobs, ReportFormat

_VERSION = "3.0.1"
_J_PER_KWH = 3.6e6


def spdx_text(jobs: ReportedJobs) -> str:
    """Return the energy of one training, whose jobs are given, as JSON-LD; raise UsageError if none is known."""
    reports, made_at = jobs.reports, jobs.made_at
    used_j = [use_j for report in reports if (use_j := report.energy_use.used_j) is not None]
    if not used_j:
        raise UsageError("no energy of this job is known, so there is nothing to state")
    first = min((report.summary for report in reports), key=lambda summary: summary.started_at)
    namespace = f"https://spdx.org/spdxdocs/gpuenergyd-{first.job_id}"
    agent, user, package = (f"{namespace}#{name}" for name in ("tool", "user", "model"))
    quantity = {
        "type": "ai_EnergyConsumptionDescription",
        "ai_energyQuantity": f"{sum(used_j) / _J_PER_KWH:.9f}",
        "ai_energyUnit": "kilowattHour",
    }
    elements: list[dict[str, Any]] = [
        {
            "type": "SpdxDocument",
            "spdxId": f"{namespace}#document",
            "name": f"Training energy of {first.job_name}",
            "profileConformance": ["core", "software", "ai"],
            "rootElement": [package],
            "element": [agent, user, package],
        },
        {"type": "SoftwareAgent", "spdxId": agent, "name": f"gpuenergyd {__version__}"},
        {"type": "Person", "spdxId": user, "name": dict(first.tags).get("user", "NOASSERTION")},
        {
            "type": "ai_AIPackage",
            "spdxId": package,
            "name": first.job_name,
            "suppliedBy": user,
            "releaseTime": _instant(max(report.summary.ended_at or made_at for report in reports)),
            "software_packageVersion": first.job_id,
            "software_downloadLocation": "NOASSERTION",
            "software_primaryPurpose": "model",
            "ai_informationAboutTraining": _training_text(reports),
            "ai_energyConsumption": {"type": "ai_EnergyConsumption", "ai_trainingEnergyConsumption": [quantity]},
        },
    ]
    creation = {"specVersion": _VERSION, "created": _instant(made_at), "createdBy": [agent]}
    info = {"type": "CreationInfo", "@id": "_:creation", **creation}
    graph = [info, *({**element, "creationInfo": "_:creation"} for element in elements)]
    context = f"https://spdx.org/rdf/{_VERSION}/spdx-context.jsonld"
    return json.dumps({"@context": context, "@graph": graph}, indent=2) + "\n"


def _training_text(reports: Sequence[JobReport]) -> str:
    """Return how the energy is known, and what it leaves out."""
    estimated_kwh = sum(report.energy_use.estimated_j or 0.0 for report in reports) / _J_PER_KWH
    missing_h = sum(report.energy_use.missing_s for report in reports) / 3600
    gpu_uuids = {uuid for report in reports for uuid in report.summary.gpu_uuids}
    simulated = " The GPUs were simulated." if any(report.summary.is_simulated for report in reports) else ""
    return (
        f"Energy of {count_text(len(gpu_uuids), 'GPU')} by their energy counters,"
        f" {estimated_kwh:.6f} kWh of it estimated from power. Left out: {missing_h:.2f} GPU hours without readings,"
        f" processors, network and cooling.{simulated}"
    )


def _instant(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


SPDX = ReportFormat(spdx_text, is_of_one_training=True)
