"""Sweeps: one command line, many runs, each in a process and a folder of its own. Imports no torch.

``plan`` turns words into jobs, ``folder`` keeps them in ``sweep.json``, ``jobs`` runs one of them, ``pool`` runs them all,
``batch`` is what launchers of Hydra call, ``summary`` prints the table at the end.
"""
