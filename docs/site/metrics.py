"""Metrics reference, generated from the Prometheus collector."""

from typing import Any

from docs.site.markdown import code, page, table
from gpuenergyd_otlp.prometheus import StatusCollector


class _Anything(dict[str, Any]):
    """Status in which every field exists and every list is empty, so that every metric is exported without samples."""

    def __missing__(self, key: str) -> "_Anything":
        return _Anything()

    def __float__(self) -> float:
        return 0.0


def exported_families() -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Return name, kind, labels and help text of every exported metric."""
    found = []
    for family in StatusCollector(_Anything(carbon=_Anything(), power=_Anything())).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: tuple[str, ...] = getattr(family, "_labelnames", ())  # not public in the library
        found.append((name, family.type, tuple(labels), family.documentation))
    return tuple(found)


def metrics_page() -> str:
    """Return the page with all metrics."""
    rows = [(code(name), kind, ", ".join(map(code, labels)), text) for name, kind, labels, text in exported_families()]
    return page(
        "Metrics",
        "`GET /v1/metrics` on the socket, and `gpuenergyd dashboard --metrics` for a Prometheus on the same host. Base"
        " units; unknown values are omitted, never 0. A Grafana dashboard: `docs/grafana/gpuenergyd.json`.",
        table(("metric", "kind", "labels", "description"), rows),
    )
