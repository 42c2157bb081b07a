"""Emissions of a training as metadata of a Hugging Face model card: https://huggingface.co/docs/hub/model-cards-co2."""

import json
from collections import Counter

from gpuenergyd import __version__
from gpuenergyd.errors import UsageError
from gpuenergyd.report.plugin_formats import ReportedJobs, ReportFormat


def model_card_text(jobs: ReportedJobs) -> str:
    """Return YAML for the head of a card's README.md; its strings are quoted as in JSON, which YAML reads.

    Raises:
        UsageError: no emissions of the training are known.
    """
    reports = jobs.reports
    carbon = [report.carbon for report in reports if report.carbon is not None]
    known_g = [emitted_g for report in reports if (emitted_g := report.energy_use.carbon_g) is not None]
    if not carbon or not known_g:
        raise UsageError("no emissions of this job are known: set carbon_signal before a training begins")
    priced_j = sum(report.energy_use.priced_j or 0.0 for report in reports)
    used_j = sum(report.energy_use.used_j or 0.0 for report in reports)
    signals = sorted({f"{zone.signal.source} ({zone.signal.kind}, {zone.signal.factor})" for zone in carbon})
    pues = sorted({f"{zone.pue:g}" for zone in carbon})
    notes = [f"emissions of {100 * priced_j / used_j:.0f} % of the energy"] if priced_j < 0.995 * used_j else []
    estimated_g = sum(report.energy_use.estimated_carbon_g or 0.0 for report in reports)
    notes += [f"{100 * estimated_g / sum(known_g):.0f} % of the emissions from estimated energy"] if estimated_g else []
    assumed_w = sorted({f"{zone.host_power_w:g}" for zone in carbon if zone.host_power_w})
    notes += [f"including {', '.join(assumed_w)} W assumed for the host"] if assumed_w else []
    notes += ["GPUs simulated"] if any(report.summary.is_simulated for report in reports) else []
    source = f"gpuenergyd {__version__}: energy of GPUs, intensity of {', '.join(signals)}, PUE {', '.join(pues)}"
    ranks = jobs.history.ranks([report.summary.job_id for report in reports])
    models = Counter({rank.gpu_uuid: rank.gpu_model_name for rank in ranks}.values())
    fields = {
        "source": "; ".join([source, *notes]),
        "geographical_location": ", ".join(sorted({zone.signal.zone for zone in carbon})),
        "hardware_used": ", ".join(f"{number} x {model}" for model, number in sorted(models.items())),
    }
    lines = [f"  {name}: {json.dumps(text, ensure_ascii=False)}" for name, text in fields.items()]
    return "\n".join(["co2_eq_emissions:", f"  emissions: {sum(known_g):.6g}", *lines]) + "\n"


MODEL_CARD = ReportFormat(model_card_text, is_of_one_training=True)
