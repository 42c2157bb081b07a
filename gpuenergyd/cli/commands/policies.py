"""`gpuenergyd policies`: lists installed plugins, and manages what the policy `bubble-aware` learned from past jobs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.errors import UsageError

_KINDS = {
    "policy": "gpuenergyd.policies",
    "target": "gpuenergyd.targets",
    "power target": "gpuenergyd.power_targets",
    "planner": "gpuenergyd.planners",
    "carbon source": "gpuenergyd.carbon_sources",
}


def policies(
    *,
    show_prior: Annotated[
        bool, typer.Option("--show-prior", help="Show the curves that new jobs start from, and your past jobs.")
    ] = False,
    export_prior: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write your past jobs to a file for another site.")
    ] = None,
    import_prior: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use exported past jobs for all users (administrators).")
    ] = None,
    forget_prior: Annotated[bool, typer.Option("--forget-prior", help="Delete your past jobs.")] = False,
    all_users: Annotated[
        bool,
        typer.Option("--all-users", help="Show, export or forget those of all users, and imported (administrators)."),
    ] = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """List policies, or show and manage what past jobs have taught.

    Plugins (policies, targets, power targets, planners, carbon sources) are found by entry point; a plugin that cannot
    be loaded is shown with the reason. With the policy `bubble-aware`, a job leaves its curves of time and power
    behind. Later jobs of the same user on the same GPU model start from them, and the more similar they are, the more
    the curves count. Nobody else sees or uses them.

    Examples:
        gpuenergyd policies
        gpuenergyd policies --show-prior
        gpuenergyd policies --export-prior past-jobs.json
        gpuenergyd policies --import-prior past-jobs.json
        gpuenergyd policies --forget-prior
    """
    wanted = {
        "--show-prior": show_prior,
        "--export-prior": export_prior is not None,
        "--import-prior": import_prior is not None,
        "--forget-prior": forget_prior,
    }
    given = [name for name, is_given in wanted.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined")
    if all_users and (not given or import_prior is not None):
        raise UsageError("--all-users needs --show-prior, --export-prior or --forget-prior")
    if not given:
        return _list_plugins(as_json=as_json)
    from gpuenergyd.cli.commands.past_jobs import PriorClient  # noqa: PLC0415  start fast

    with PriorClient.open(socket, is_for_all_users=all_users, as_json=as_json) as client:
        if export_prior is not None:
            client.export_to(export_prior)
        elif import_prior is not None:
            client.import_from(import_prior)
        elif forget_prior:
            client.forget()
        else:
            client.show()
    return 0


def _list_plugins(*, as_json: bool) -> int:
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
