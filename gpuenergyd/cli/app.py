"""The commands, by name; each module imports what is heavy only when its command runs."""

from typing import Annotated

import typer

from gpuenergyd import __version__
from gpuenergyd.cli.carbon import carbon
from gpuenergyd.cli.demo import demo
from gpuenergyd.cli.doctor import doctor
from gpuenergyd.cli.explain import explain
from gpuenergyd.cli.leases import limit, lock
from gpuenergyd.cli.plan import plan
from gpuenergyd.cli.policies import policies
from gpuenergyd.cli.report import report
from gpuenergyd.cli.restore import restore
from gpuenergyd.cli.run import run
from gpuenergyd.cli.serve import serve
from gpuenergyd.cli.status import status

app = typer.Typer(
    name="gpuenergyd",
    help="Make GPU training use less energy at the same speed.",
    epilog="Exit codes: 0 fine, 1 failed, 2 usage, 3 daemon not running, 4 degraded.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuenergyd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Make GPU training use less energy at the same speed."""


for _command in (demo, serve, run, status, report, plan, explain, policies, lock, limit, restore, doctor):
    app.command()(_command)
app.add_typer(carbon)
