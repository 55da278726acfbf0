"""How a command of the lab is stopped: Ctrl-C and SIGTERM end it cleanly, and what it knows is written down in any case."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stops:
    """Which signal has come.

    Attributes:
        number: of the last one; SIGINT before any.
    """

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)

    @property
    def code(self) -> int:
        """The exit status after it: 130 or 143."""
        return 128 + self.number

    @property
    def name(self) -> str:
        """``SIGINT``."""
        return signal.Signals(self.number).name


@contextmanager
def stoppable() -> Iterator[Stops]:
    """Both signals raise ``KeyboardInterrupt`` inside, and the result says which it was."""
    stops = Stops()

    def stop(number: int, frame: FrameType | None) -> None:
        stops.number = number
        raise KeyboardInterrupt

    with _handled(stop):
        yield stops


@contextmanager
def writing() -> Iterator[None]:
    """For the second that it takes to write a result: the first signal waits until it is there, a further one counts at once."""
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if waiting:
            raise KeyboardInterrupt
        waiting.append(number)

    with _handled(note):
        yield
    if waiting:
        signal.raise_signal(waiting[0])


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
