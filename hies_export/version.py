"""The version of the package, for files that the package itself imports."""

__version__ = "0.1.0"
