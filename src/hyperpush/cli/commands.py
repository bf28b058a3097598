"""Commands that installed distributions add by the entry point `hyperpush.commands`: a name and a Typer app."""

from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hyperpush.base.errors import HyperpushError
from hyperpush.base.extensions import COMMANDS, PAPERS, extensions, has_papers, load_extension

USAGE_ERROR: Any = typer.BadParameter.__base__  # of Click, which newer versions of Typer bring along


class Commands(TyperGroup):
    """Our commands, then those of others. One of theirs is imported when it is named; `--help` imports all of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in extensions(COMMANDS) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command that is called so, or None."""
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
        """The command that the arguments ask for; where there is none, how to get the papers' ones."""
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            if not has_papers():
                error.message = f"{error.message.rstrip('.')} ({PAPERS})"
            raise


def _broken(name: str, error: HyperpushError) -> TyperCommand:
    """A command that says why it cannot run, whatever it is given."""

    def fail() -> NoReturn:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(name, callback=fail, help=str(error), context_settings=settings, add_help_option=False)
