"""Several hosts on one machine: network namespaces on a bridge, each link shaped.

See the README beside this file.
"""

from benchmarks.lab.lab import Lab, RunResult
from benchmarks.lab.network import LabError, LinkBytes, Network, obstacle, sweep

__all__ = ["Lab", "LabError", "LinkBytes", "Network", "RunResult", "obstacle", "sweep"]
