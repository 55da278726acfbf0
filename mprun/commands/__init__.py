"""The commands: one module with ``run(words)`` each, imported when it is called."""

# Hydra's flags that are followed by a value, which is no word of ours.
VALUED_FLAGS = {"--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp"}
