"""Processes forked from one that has loaded what they need, and memory that outlives them.

See the README beside this.
"""

from pibroch.forkserver.child import ForkedProcess
from pibroch.forkserver.link import Link, link_to_server
from pibroch.forkserver.server import ForkServer, can_fork

__all__ = ["ForkServer", "ForkedProcess", "Link", "can_fork", "link_to_server"]
