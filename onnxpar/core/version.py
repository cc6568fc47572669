"""The version of the package, which manifests and the command line show."""

__version__ = "0.1.0"
