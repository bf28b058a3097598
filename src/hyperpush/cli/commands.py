"""Add the commands of installed distributions, which are Typer apps in the entry point group `hyperpush.commands`."""

from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hyperpush.base.errors import HyperpushError
from hyperpush.base.extensions import COMMANDS, PAPERS, extensions, has_papers, load_extension

USAGE_ERROR: Any = typer.BadParameter.__base__  # Click's UsageError; newer versions of Typer contain their own Click


class Commands(TyperGroup):
    """Commands of the library, followed by those of extensions.

    An extension is imported when its command is used; `--help` imports all extensions.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in extensions(COMMANDS) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name; None if it does not exist."""
        own = super().get_command(ctx, cmd_name)
        point = extensions(COMMANDS).get(cmd_name)
        if own is not None or point is None:
            return own
        try:
            command = typer.main.get_command(load_extension(point, typer.Typer))
        except HyperpushError as error:
            return _broken(cmd_name, error)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name.

        If it does not exist, the error explains how to install the commands of the papers' package.
        """
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            if not has_papers():
                error.message = f"{error.message.rstrip('.')} ({PAPERS})"
            raise


def _broken(name: str, error: HyperpushError) -> TyperCommand:
    """Return a command that raises this error for all arguments, in place of an extension that cannot be loaded."""

    def fail() -> NoReturn:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(name, callback=fail, help=str(error), context_settings=settings, add_help_option=False)
