"""The metrics' reference, from the collector that answers Prometheus."""

from typing import Any

from docs.site.markdown import code, page, table
from gpuenergyd.daemon.api.metrics import StatusCollector


class _Anything(dict[str, Any]):
    """A status in which everything is known and nothing is listed: every family is there, without a sample."""

    def __missing__(self, key: str) -> "_Anything":
        return _Anything()

    def __float__(self) -> float:
        return 0.0


def exported_families() -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Return name as Prometheus sees it, kind, labels and explanation of every metric."""
    found = []
    for family in StatusCollector(_Anything(carbon=_Anything())).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: tuple[str, ...] = getattr(family, "_labelnames", ())  # the library keeps them to itself
        found.append((name, family.type, tuple(labels), family.documentation))
    return tuple(found)


def metrics_page() -> str:
    """Return every metric."""
    rows = [(code(name), kind, ", ".join(map(code, labels)), text) for name, kind, labels, text in exported_families()]
    return page(
        "Metrics",
        "`GET /v1/metrics` on the socket, and `gpuenergyd dashboard --metrics` for a Prometheus on the same host. Base"
        " units; what is not known is left out, never 0. A Grafana dashboard of them: `docs/grafana/gpuenergyd.json`.",
        table(("metric", "kind", "labels", "what it says"), rows),
    )
