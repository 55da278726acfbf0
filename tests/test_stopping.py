"""Signals in the middle of a command of the lab: an exit status that says so, and what is known is in the folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mprun.cli import main
from mprun.commands.stopping import stoppable, writing
from tests.test_disk_trouble import QUICK

WORDS = {"diagnose": ["diagnose.steps=4"], "search": ["search.steps=4"]}
BOTH = [signal.SIGINT, signal.SIGTERM]


def result(folder: Path, command: str) -> dict[str, Any]:
    (found,) = (folder / "outputs" / command).glob("*/*/result.json")
    content: dict[str, Any] = json.loads(found.read_text())
    return content


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("command", WORDS)
def test_a_signal_while_it_works_keeps_what_is_known(tmp_path, monkeypatch, command, number):
    import mprun.lab.reference as reference

    real, steps = reference.train_step, []

    def step(*args: Any, **more: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(number)
        return real(*args, **more)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reference, "train_step", step)
    assert main([command, *QUICK, "train.steps=6", *WORDS[command]]) == 128 + number
    found = result(tmp_path, command)
    assert (found["status"], found["exit_code"]) == ("interrupted", 128 + number)
    assert len(steps) == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("command", WORDS)
def test_a_signal_while_the_result_is_written_loses_nothing_of_it(tmp_path, monkeypatch, command):
    import importlib

    module = importlib.import_module(f"mprun.commands.{command}")
    name = {"search": "_write_result", "diagnose": "_write"}[command]
    real = getattr(module, name)

    def write(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, name, write)
    assert main([command, *QUICK, "train.steps=6", *WORDS[command]]) == 130
    assert result(tmp_path, command)["status"] == "ok"


def test_a_second_signal_counts_at_once():
    done = []

    def twice() -> None:
        with stoppable() as stops, writing():
            done.append(stops)
            signal.raise_signal(signal.SIGTERM)
            done.append("on")
            signal.raise_signal(signal.SIGTERM)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert done[1:] == ["on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
