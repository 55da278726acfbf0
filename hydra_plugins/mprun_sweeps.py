"""What Hydra finds of mprun's sweeps: the launcher ``process``, the sweeper ``grid``, the resolver that names a job's folder.

Hydra takes launchers and sweepers from the namespace package ``hydra_plugins`` alone, and looks through it in every
program that uses Hydra, also in those that have nothing to do with mprun. So nothing of mprun is imported here before it
is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

# Plain mappings: a dataclass would look for its module in sys.modules, where Hydra puts a plugin only after it was run.
LAUNCHER = {"_target_": "hydra_plugins.mprun_sweeps.ProcessLauncher"}
SWEEPER = {"_target_": "hydra_plugins.mprun_sweeps.GridSweeper", "params": {}}
ConfigStore.instance().store(group="hydra/launcher", name="process", node=LAUNCHER, provider="mprun")
ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=SWEEPER, provider="mprun")


class ProcessLauncher(Launcher):  # type: ignore[misc]
    """Every job in a process of its own."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra gives."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one batch of jobs, and give back their metrics."""
        from mprun.sweeps.batch import launch

        return launch(self.config, job_overrides, initial_job_idx)


class GridSweeper(Sweeper):  # type: ignore[misc]
    """Every combination of the values: those jobs of ``sweep.json`` in Hydra's sweep folder that are not finished."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Launch what is left to do."""
        from mprun.sweeps.batch import left

        if jobs := left(self.config.hydra.sweep.dir):
            return self.launcher.launch(jobs, initial_job_idx=0)
        return []


def _job_hash(*, _root_: DictConfig) -> str:
    from mprun.sweeps.plan import hash_of

    return hash_of(_root_)


# Not in mprun alone: the workers of a launcher import this module, because Hydra sends them its classes.
OmegaConf.register_new_resolver("mprun_hash", _job_hash, replace=True)
