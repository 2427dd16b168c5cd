"""The documentation: its code runs as it is written."""
