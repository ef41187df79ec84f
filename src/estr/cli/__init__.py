"""The command line: one file for each command, listed in COMMANDS.

Each command imports what it needs when it runs, so that `estr --help` is immediate; errors raised
on purpose become one line and an exit code.

    0    done
    2    the recipe, a flag or an option is wrong
    130  stopped by the user
    1    anything else
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

import click

from ..errors import ConfigError, DataError, EstrError, Interrupted
from .bench import bench
from .check import check
from .evaluate import evaluate
from .export import export
from .lab import lab
from .ledger import ledger
from .replay import replay
from .report import report
from .runs import runs
from .sample import sample
from .train import train
from .warmstart import warmstart

COMMANDS: tuple[click.Command, ...] = (
    train,
    evaluate,
    sample,
    export,
    ledger,
    replay,
    report,
    check,
    runs,
    bench,
    lab,
    warmstart,
)

_DISK_ERRORS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""What a disk that is full, or may not be written to, answers; no error of the program's own."""


class _Commands(click.Group):
    """Where errors become a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EstrError as error:
            if ctx.params["debug"]:
                raise
            ctx.exit(_report(error))
        except KeyboardInterrupt:
            ctx.exit(_report(Interrupted("stopped")))
        except OSError as error:
            if ctx.params["debug"] or error.errno not in _DISK_ERRORS:
                raise
            place = "" if error.filename is None else f"{error.filename}: "
            remedy = "look at the space and the rights there"
            ctx.exit(_report(DataError(f"{place}{error.strerror}; {remedy}")))


def _report(error: EstrError) -> int:
    from ..printable import printable

    with contextlib.suppress(OSError):  # a terminal that hung up: the exit code still tells
        click.echo(f"error: {printable(str(error), newlines=True)}", err=True)
    return 2 if isinstance(error, ConfigError) else 130 if isinstance(error, Interrupted) else 1


@click.group(cls=_Commands)
@click.version_option(package_name="estr")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Asynchronous reinforcement learning of language models with the Entropy-Scaled Trust Region.

    \b
    estr train                        train the built-in model on the built-in task
    estr sample calculator            what it wrote before, and what it writes now
    estr eval calculator --k 4        held-out accuracy, with intervals
    """


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Entry of the `estr` command."""
    # Closed streams (`>&-`) are None; whoever closed them does not want to read.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli()
