"""`gpuenergyd policies`: lists installed plugins, their packages, and why a broken one cannot be loaded."""

from dataclasses import asdict

from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import people_console, print_json

_KINDS = {
    "policy": "gpuenergyd.policies",
    "target": "gpuenergyd.targets",
    "planner": "gpuenergyd.planners",
    "carbon source": "gpuenergyd.carbon_sources",
}


def policies(*, as_json: JsonOption = False) -> int:
    """List policies, targets, planners and carbon sources.

    Plugins are found by entry point; a plugin that cannot be loaded is shown with the reason.

    Examples:
        gpuenergyd policies
        gpuenergyd policies --json
    """
    from gpuenergyd.daemon.processes.plugins import installed_policies  # noqa: PLC0415  imports every plugin

    found = [(kind, plugin) for kind, group in _KINDS.items() for plugin in installed_policies(group)]
    if as_json:
        rows = []
        for kind, plugin in found:
            row = asdict(plugin)
            row["package"] = row.pop("distribution")
            rows.append({"kind": kind, **row, "is_usable": plugin.error is None})
        print_json({"policies": rows})
        return 0
    from rich import box  # noqa: PLC0415  only tables need it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("name", "kind", "package", "version"):
        table.add_column(title, no_wrap=True)
    table.add_column("")
    for kind, plugin in found:
        note = Text("ok") if plugin.error is None else Text("broken", style="bold red")
        table.add_row(plugin.name, kind, plugin.distribution, plugin.version, note)
    console = people_console()
    if not found:
        console.print("no policies installed; jobs run at full speed")
        return 0
    console.print(table)
    for kind, plugin in found:
        if plugin.error is not None:
            console.print(f"{kind} {plugin.name} is broken: {plugin.error}", soft_wrap=True, markup=False)
    return 0
