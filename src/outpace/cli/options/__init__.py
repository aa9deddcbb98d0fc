"""The options of the commands, as types that typer reads."""
