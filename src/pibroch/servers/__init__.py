"""Embedding servers: processes that hold the homes of rows for trainers, reached by the tensor RPC.

See docs/lookahead.md, and docs/design/0006-embedding-servers.md for what is inside.
"""

from pibroch.servers.group import join, leave, serve, started

__all__ = ["join", "leave", "serve", "started"]
