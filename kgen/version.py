"""The version of kgen: part of every emitted header and of every cache key."""

__version__ = "0.1.0"
