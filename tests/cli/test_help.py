"""What the command line says of itself."""

import re

import click
import pytest
import typer

from fl_privacy.cli.main import app, run_command_line

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_of_a_command_is_described(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([name, "--help"]) == 0
    shown = _plain(capfd.readouterr().out)
    described = [p for p in COMMANDS[name].params if isinstance(p, click.Argument | click.Option)]
    for parameter in described:
        assert parameter.help, f"{name} {parameter.name}"
        assert _plain(parameter.help) in shown


def test_the_arguments_are_those_that_were_written_down(capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("run", "Hydra overrides."),
        ("trade-off", "A name that `fl-privacy list` shows"),
        ("report", "Folders of runs."),
    ):
        run_command_line([name, "--help"])
        assert _plain(text) in _plain(capfd.readouterr().out)


def test_without_a_command_there_is_help_and_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([]) == 0
    printed = capfd.readouterr()
    assert "Usage" in printed.out
    assert "trade-off" in printed.out
    assert not printed.err


def test_metrics_are_listed_by_either_number_of_the_word(capfd: pytest.CaptureFixture[str]) -> None:
    listed = []
    for kind in ("metric", "metrics"):
        assert run_command_line(["list", kind]) == 0
        listed.append(capfd.readouterr().out)
    assert "psnr" in listed[0]
    assert listed[0] == listed[1]


def _plain(text: str) -> str:
    """Without frames and breaks of lines, which depend on the width of the terminal."""
    return re.sub(r"[\s│]+", "", text)
