"""Help texts fit the terminal, say nothing twice, and exist for every command that has flags of its own."""

from __future__ import annotations

from importlib import import_module

import pytest

from mprun.cli import COMMANDS, OWN_HELP, help_text, main
from mprun.commands.list import option_line


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_list_of_commands_fits(width: int) -> None:
    text = help_text(width)
    listed = text.split("\ncommands\n")[1].split("\n\nexamples\n")[0]
    assert max(map(len, listed.splitlines())) <= width
    for name, said in COMMANDS.items():
        assert f"{name:<10}{said}" in " ".join(listed.split("\n" + " " * 12)), name


@pytest.mark.parametrize("command", OWN_HELP)
def test_a_command_explains_itself(command: str, capsys) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"mprun {command}")
    assert "``" not in out
    # Flags that the command reads are in its help.
    for flag in getattr(import_module(f"mprun.commands.{command}"), "VALUED", ()):
        assert flag in out, flag


def test_a_long_description_is_wrapped_beside_its_name_in_a_terminal_only() -> None:
    text = "Random images with random labels, for measuring speed only; size and number as in dataset.kwargs.image_size=64."
    lines = option_line("synthetic", text, 13, 80).splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 17) and line[17] != " " for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"synthetic {text}"
    assert option_line("synthetic", text, 13, 0) == f"  {'synthetic':<13}  {text}"
