"""Entry point reference: all plugin groups with the entry points of this project."""

import tomllib
from pathlib import Path

from docs.site.markdown import code, page, table

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GROUPS = {
    "gpuenergyd.commands": (
        "A [CommandEntry](python-api.md#commandentry): a command of `gpuenergyd`, see"
        " [write a plugin](../how-to/write-a-plugin.md#a-command)."
    ),
    "gpuenergyd.routes": (
        "A class of [PluginRoutes](python-api.md#pluginroutes): further routes of the daemon's API, see"
        " [write a plugin](../how-to/write-a-plugin.md#api-routes)."
    ),
    "gpuenergyd.host_services": (
        "A class of [HostService](python-api.md#hostservice): a part of the daemon that acts on all jobs and GPUs, see"
        " [write a plugin](../how-to/write-a-plugin.md#a-service-of-the-host)."
    ),
    "gpuenergyd.tasks": (
        "A function from JSON to JSON, as texts: work of a service that runs in a policy host, since in the daemon it"
        " would delay every training program."
    ),
    "gpuenergyd.report_groups": (
        "A function of the type [ReportGroup](python-api.md#reportgroup): figures for `gpuenergyd report --group-by"
        " KEY`, and a section of HTML reports."
    ),
    "gpuenergyd.report_formats": (
        "A [ReportFormat](python-api.md#reportformat): a format of `gpuenergyd report --format NAME`, such as `html`."
    ),
    "gpuenergyd.policies": (
        "A class with `next_plan(view)`, see [ClockPolicy](python-api.md#clockpolicy): decides the clocks of one job."
    ),
    "gpuenergyd.targets": (
        "A class with `next_target(view)`, see [TargetPolicy](python-api.md#targetpolicy): sets the performance that a"
        " job must meet."
    ),
    "gpuenergyd.power_targets": (
        "A class with `divide(view)`, see [PowerTargetPolicy](python-api.md#powertargetpolicy): divides a host's power"
        " budget among its jobs."
    ),
    "gpuenergyd.planners": (
        "A function from `OfflineRequest` to `OfflinePlan`, see [OfflinePlanner](python-api.md#offlineplanner): plans"
        " from tables, for `gpuenergyd plan --policy NAME`."
    ),
    "gpuenergyd.flat_planners": (
        "An object or module with `flat_plan` and `flattest_order`: makes the plans of `bubble-aware:flattest=true`."
    ),
    "gpuenergyd.kernels": (
        "A function that calls all compiled kernels of a plugin, with the plan of a tiny pipeline: kernels are compiled"
        " when installing, or before the first plan."
    ),
    "gpuenergyd.carbon_sources": (
        "A function from a `SourceRequest` to an object with `signal` and `fetch`: queries a carbon intensity provider."
    ),
    "gpuenergyd.drivers": (
        "A function from the path of the driver's file, or None, to a [GpuDriver](python-api.md#gpudriver): finds,"
        " reads and changes the GPUs of one vendor. What it can do are capabilities, such as `HasClocks`; `status`"
        " names those that it lacks."
    ),
    "gpuenergyd.waiting_powers": (
        "A function that returns, by the key of each GPU model it knows, pairs of SM clock and power while waiting, for"
        " `gpuenergyd plan --waiting-power MODEL`."
    ),
    "gpuenergyd.exchanges": (
        "`loop` and `replica`: a [PaceExchange](python-api.md#paceexchange) of the replicas of a training with other"
        " hosts. `pipeline`: a [PipelineExchange](python-api.md#pipelineexchange), for pipelines that span hosts."
    ),
    "gpuenergyd.launchers": (
        "A function from an environment to the environment of a program started by `gpuenergyd run`, so that the"
        " program attaches automatically, or its GPUs are ready for it."
    ),
}
"""Purpose of each group; a test compares the keys with pyproject.toml."""


def offered_entry_points() -> dict[str, dict[str, str]]:
    """Return the entry points of this project, by group."""
    found: dict[str, dict[str, str]] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    return found


def entry_points_page() -> str:
    """Return the page with all groups and the entry points of this project."""
    parts = [
        (
            "Plugins are found by entry point only; the plugins of gpuenergyd use the same groups. `gpuenergyd"
            " policies` lists installed plugins with their packages, and those that cannot be loaded."
        )
    ]
    for group, offers in offered_entry_points().items():
        rows = ((code(name), code(value)) for name, value in offers.items())
        parts += [f"## {group}", GROUPS[group], table(("name", "object"), rows)]
    return page("Entry points", *parts)
