"""The versions this package is, and is built for."""

__version__ = "0.1.0"

MAX_VERSION = "26.7.0"
MOJO_VERSION = "1.2.0"
