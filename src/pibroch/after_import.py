"""Something to be done once another module is there, without loading it: now, or right after the program imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(name: str, do: Callable[[], None]) -> None:
    """Call ``do`` when the module of this name has been imported; at once where it is there already."""
    if name in sys.modules and not getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False):
        do()
    else:
        sys.meta_path.insert(0, _Watcher(name, do))


class _Watcher(MetaPathFinder):
    """Finds one module as everybody else would, to be told when it is loaded; leaves when it has found it."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self._name, self._do = name, do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithSequel(spec.loader, self._do)
        return spec


class _LoaderWithSequel(Loader):
    """Another loader, after which something is done."""

    def __init__(self, loader: Loader, do: Callable[[], None]) -> None:
        self._loader, self._do = loader, do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._do()
