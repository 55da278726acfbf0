"""Hyperparameter search: a study of Optuna's whose trials are runs, each a process of its own. Imports no torch."""
