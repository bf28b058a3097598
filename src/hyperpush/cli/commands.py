"""Commands that installed distributions add by the entry point `hyperpush.commands`: a name and a Typer app."""

from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hyperpush.base.errors import HyperpushError
from hyperpush.base.extensions import COMMANDS, PAPERS, extensions, has_papers, load_extension

USAGE_ERROR: Any = typer.BadParameter.__base__  # the class of Click, which newer versions of Typer include


class Commands(TyperGroup):
    """Commands of the library, then those of extensions, which are imported on use; `--help` imports all of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in extensions(COMMANDS) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name, or None."""
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
        """Return the command in the arguments; if it does not exist, the error explains how to add the papers'."""
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            if not has_papers():
                error.message = f"{error.message.rstrip('.')} ({PAPERS})"
            raise


def _broken(name: str, error: HyperpushError) -> TyperCommand:
    """Return a command that raises an error for all arguments."""

    def fail() -> NoReturn:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(name, callback=fail, help=str(error), context_settings=settings, add_help_option=False)
