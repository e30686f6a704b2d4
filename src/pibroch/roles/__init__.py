"""Processes beside the trainers of a run: which there are, where they meet, who starts them.

See docs/roles.md, and docs/design/0007-data-processors.md. A role is one file:
docs/extending/role.md.
"""

from pibroch.roles.registry import BUILT_IN, register_role, roles
from pibroch.roles.role import Role, RoleOption

EMBEDDING_SERVER, ORACLE, DATA_PROCESSOR = BUILT_IN

__all__ = [
    "DATA_PROCESSOR",
    "EMBEDDING_SERVER",
    "ORACLE",
    "Role",
    "RoleOption",
    "register_role",
    "roles",
]
