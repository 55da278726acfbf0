"""Which modules of a model hold parameters or buffers: known from step to step, looked up again when something was registered.

A step asks twice, before its forward passes and after them. Looking through all modules every time costs more than most
other parts of a small model's step, and half of them (activations, dropout, containers) hold nothing. torch tells of every
parameter, buffer and module that is registered or assigned, anywhere in the process; as long as it told of none, what was
found the last time is true. It does not tell of a deletion: :meth:`Structure.look` finds those too, and is called before
a checkpoint is written.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mprun.training.buffers import Modules, has_extra_state, walk


class _Registrations:
    """How many parameters, buffers and modules were registered in this process since this module was imported."""

    count = 0


def _note(*_: Any) -> None:
    _Registrations.count += 1


register_module_parameter_registration_hook(_note)
register_module_buffer_registration_hook(_note)
register_module_module_registration_hook(_note)


class Structure:
    """The modules of ``model`` that hold something."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen = -1
        self._holders: Modules = []

    def holders(self) -> Modules:
        """Modules that have (or had) parameters, buffers or extra state, with their paths, in the order of ``named_modules``."""
        if self._seen != _Registrations.count:
            self.look()
        return self._holders

    def look(self) -> Modules:
        """:meth:`holders`, looked up now."""
        self._seen = _Registrations.count
        # One that holds nothing any more is kept: a window that is lost gives its buffers back.
        before = {module for _, module in self._holders}
        self._holders = [
            (path, module)
            for path, module in walk(self.model)
            if module._parameters or module._buffers or module in before or has_extra_state(module)
        ]
        return self._holders
