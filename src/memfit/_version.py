"""The version of memfit, read by the build and by `memfit.__version__`."""

__version__ = "0.1.0"
