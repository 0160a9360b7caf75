"""Dispatchers: the ways by which tokens meet experts. One a file, found by scanning this folder.

A dispatcher never knows which router ran: it carries out an `Assignment`, and all of them compute the same function.
The contract is `fef.dispatch.base.Dispatcher`.
"""

from fef.registry import Registry

DISPATCHERS: Registry = Registry("dispatcher")
