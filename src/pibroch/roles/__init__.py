"""Processes beside the trainers of a run: which there are, where they meet, who starts them.

See docs/roles.md, and docs/design/0007-data-processors.md.
"""

from pibroch.roles.role import DATA_PROCESSOR, EMBEDDING_SERVER, ORACLE, ROLES, Role

__all__ = ["DATA_PROCESSOR", "EMBEDDING_SERVER", "ORACLE", "ROLES", "Role"]
