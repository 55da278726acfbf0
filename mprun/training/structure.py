"""Which modules of a model hold parameters or buffers: known from step to step, looked up again when something was registered.

A step asks twice, before its forward passes and after them. Looking through all modules every time costs more than most
other parts of a small model's step, and half of them (activations, dropout, containers) hold nothing. torch tells of every
parameter, buffer and module that is registered or assigned, anywhere in the process; as long as it told of none, what was
found the last time is true. It does not tell of what is deleted, what is written into a module's own dictionaries
(``ModuleList.insert`` does that) and what compiled code registers; that the dictionaries have as many entries as before is
looked at too. :meth:`Structure.look` trusts neither, and is called before a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mprun.training.arrival import ParameterDict
from mprun.training.buffers import Modules, has_extra_state


class _Registrations:
    """How many parameters, buffers and modules were registered in this process since this module was imported."""

    count = 0


def _note(*_: Any) -> None:
    # A compiled function that counted would depend on the count, and be compiled again whenever it is called.
    if not torch.compiler.is_compiling():
        _Registrations.count += 1


register_module_parameter_registration_hook(_note)
register_module_buffer_registration_hook(_note)
register_module_module_registration_hook(_note)


class Structure:
    """The modules of ``model`` that hold something. Ask through :meth:`current`.

    Attributes:
        modules: all modules.
        buffered: those that have (or had) buffers, or have extra state, with their paths, in the order of ``named_modules``.
        parameters: what every module that has (or had) parameters holds them in, in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: Set[nn.Module] = frozenset()
        self.buffered: Modules = []
        self.parameters: list[ParameterDict] = []
        self._entries: list[Mapping[str, Any]] = []
        self._seen = -1, -1

    def current(self) -> Structure:
        """This one, looked up again if something has changed."""
        if self._seen != self._now():
            self.look()
        return self

    def look(self) -> None:
        """Look it all up now."""
        # One that has no buffer any more is kept: a window that is lost gives it back.
        before = {module for _, module in self.buffered}
        self.buffered, self.parameters, self._entries = [], [], []
        found = list(self.model.named_modules())
        self.modules = frozenset(module for _, module in found)
        for path, module in found:
            self._entries.append(module._modules)
            if module._parameters:  # what is in it is looked at in every step
                self.parameters.append(module._parameters)
            else:
                self._entries.append(module._parameters)
            if module._buffers or module in before or has_extra_state(module):
                self.buffered.append((path, module))
            else:
                self._entries.append(module._buffers)
        self._seen = self._now()

    def _now(self) -> tuple[int, int]:
        return _Registrations.count, sum(map(len, self._entries))
