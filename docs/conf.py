"""The site: guides and design notes as they stand, names from docstrings, commands from their help.

``make docs`` builds it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from commands import describe_commands

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "pibroch"
html_title = "pibroch"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_ambiguous"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "text"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_use_ivar = True
toc_object_entries = False

NAMES_OF = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"
OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+((?:src|examples|tests|benchmarks|recipes)/[^)#]*|[A-Z]+\.md|LICENSE)\)"
)
"""Links of a guide to files of the repository.

On the site, where these are not, their text and path.
"""


def setup(app: Sphinx) -> None:
    """Fill in what is generated, when a page is read."""
    app.connect("source-read", fill)
    app.connect("autodoc-skip-member", skip)


def skip(
    app: Sphinx, kind: str, name: str, thing: object, is_skipped: bool, options: object
) -> bool | None:
    """What a class takes over from torch, whose docstrings refer to torch's own pages."""
    return True if str(getattr(thing, "__module__", None)).startswith("torch.") else None


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Names and commands in place of their marks."""
    text = NAMES_OF.sub(lambda found: describe_names(found[1]), source[0])
    if COMMANDS in text:
        text = text.replace(COMMANDS, describe_commands())
    source[0] = OUTSIDE.sub(lambda found: link_outside(found[1], found[2]), text)


def link_outside(text: str, path: str) -> str:
    """The path, and the text before it where that says more."""
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def describe_names(module_name: str) -> str:
    """Autodoc's directives for the public names of a module.

    Those that ``pibroch`` itself has, too, stand apart.
    """
    module = importlib.import_module(module_name)
    top = importlib.import_module("pibroch")
    names = [name for name in sorted(module.__all__, key=str.lower) if not name.startswith("__")]
    elsewhere = (
        set()
        if module is top
        else {name for name in names if getattr(top, name, None) is getattr(module, name)}
    )
    lines = (
        []
        if not elsewhere
        else [
            "Also here: " + ", ".join(f"`pibroch.{name}`" for name in sorted(elsewhere)) + ".",
            "",
        ]
    )
    lines += ["```{eval-rst}"]
    for name in names:
        if name not in elsewhere:
            lines += directive(f"{module_name}.{name}", getattr(module, name))
    return "\n".join([*lines, "```"])


def directive(name: str, thing: object) -> list[str]:
    """The directive of one name.

    A value is there by its name alone, for the docstring that it has is its type's.
    """
    if inspect.isclass(thing):
        return [
            f".. auto{'exception' if issubclass(thing, BaseException) else 'class'}:: {name}",
            "   :members:",
        ]
    if inspect.ismodule(thing):
        return []
    return [f".. autofunction:: {name}"] if callable(thing) else [f".. py:data:: {name}", ""]
