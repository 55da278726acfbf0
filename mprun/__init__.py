"""mprun: a config-driven experiment runner for mixed-precision training.

Importing this package imports neither torch nor Hydra, so that commands which do not train stay fast.
"""

__version__ = "0.1.0"
