"""Something to be done once another module is there, without loading it.

Now, or right after the program imports it.

Imports nothing that the interpreter has not loaded by itself: it runs with every program that
imports pibroch.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object  # what the interpreter asks of one is here


def after_import(name: str, do: Callable[[], None]) -> None:
    """Call ``do`` when the module of this name has been imported.

    At once where it is there already.
    """
    known = sys.modules.get(name)
    if known is not None and not getattr(known.__spec__, "_initializing", False):
        do()
    else:
        sys.meta_path.insert(0, _Watcher(name, do))


class _Watcher:
    """Finds one module as everybody else would, to be told when it is loaded.

    Leaves when it has found it.
    """

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self._name = name
        self._do = do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderWithSequel(spec.loader, self._do)
                return spec
        return None


class _LoaderWithSequel(Loader):
    """Another loader, after which something is done."""

    def __init__(self, loader: Loader, do: Callable[[], None]) -> None:
        self._loader = loader
        self._do = do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._do()
