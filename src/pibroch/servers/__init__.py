"""Processes beside the trainers, reached by the tensor RPC.

Embedding servers hold the homes of rows, an oracle plans.

See docs/lookahead.md; docs/design/0006-embedding-servers.md and 0008-central-oracle.md for what is
inside.
"""

from pibroch.roles.group import leave
from pibroch.servers.group import ORACLE_NAME, join, serve, serve_plans, started

__all__ = ["ORACLE_NAME", "join", "leave", "serve", "serve_plans", "started"]
