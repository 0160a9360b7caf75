"""Dispatchers: the ways by which tokens meet experts. One a file, found by scanning this folder."""

from fef.registry import Registry

DISPATCHERS: Registry = Registry("dispatcher")
