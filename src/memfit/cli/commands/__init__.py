"""One file for each command: a frozen dataclass whose fields are the options, and `run`."""
