"""One registry for all that users add: exchanges, models, losses, optimizers, row indices, ...

What is added has a :class:`Spec`: a name, the section that recipes have for it, and where it is
built. A registry finds a spec by its name, which is one of four:

- of the house (``"dlrm"``), listed where the registry is made;
- of an installed distribution, by an entry point such as ``pibroch.models``;
- of this process, which registered it;
- a *path*, ``"my_package.my_module:MyModel"``: a class that has its section as the class variable
  ``section``, or a spec.

To find what a path names is to import its module, and that is to run it. So a path in a file that
a stranger may have written, or from another process, leads only to modules that the user imported,
or named in a recipe, by ``--import`` or in ``PIBROCH_IMPORT``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pibroch.config.base import Section
from pibroch.errors import ConfigError
from pibroch.untrusted import NO_FILES

IMPORTS = "PIBROCH_IMPORT"
"""Variable with modules that files may name, separated by commas.

Processes that are started from here inherit it.
"""

S = TypeVar("S", bound="Spec")


@dataclass(frozen=True, slots=True)
class Spec:
    """Something that a recipe can choose, before it is loaded.

    Attributes:
        name: by which users choose it.
        summary: what it does, in a line.
        section: its settings in a recipe.
        factory: makes it: a callable, or ``module:attribute``, which is imported when it is chosen.
    """

    name: str
    summary: str
    section: type[Any]
    factory: str | Callable[..., Any]

    def load(self) -> Any:
        """The factory itself, imported."""
        if not isinstance(self.factory, str):
            return self.factory
        module, _, attribute = self.factory.partition(":")
        return attrgetter(attribute)(import_module(module))

    def build(self, *args: object, **options: object) -> Any:
        """What the factory makes."""
        return self.load()(*args, **options)


class Registry(Generic[S]):
    """The specs of one kind.

    Args:
        kind: what they are, for messages: ``"model"``.
        group: of entry points: ``"pibroch.models"``. Each names a package that has a ``SPEC``, or a
            path.
        spec: their type.
        base: path of the class that classes named by a path derive from.
        built_in: paths of the house's specs, or of tuples of them, in the order in which they are
            shown.
    """

    def __init__(
        self, kind: str, group: str, spec: type[S], base: str, built_in: Sequence[str]
    ) -> None:
        self.kind = kind
        self.group = group
        self._spec = spec
        self._base = base
        self._paths = tuple(built_in)
        self._registered: dict[str, S] = {}

    @cached_property
    def built_in(self) -> Mapping[str, S]:
        """The house's own, by name."""
        loaded = [Spec("", "", Section, path).load() for path in self._paths]
        specs = [spec for each in loaded for spec in (each if isinstance(each, tuple) else (each,))]
        return {spec.name: spec for spec in specs}

    @cached_property
    def _installed(self) -> Mapping[str, S]:
        return {
            spec.name: spec
            for point in entry_points(group=self.group)
            for spec in [self._spec_of(point.value, _load(point.value), point.name)]
        }

    def all(self) -> dict[str, S]:
        """All that this process can name, without those that it knows by a path."""
        named = {name: spec for name, spec in self._registered.items() if ":" not in name}
        return {**self.built_in, **self._installed, **named}

    def has(self, name: str) -> bool:
        """Whether :meth:`find` can be called with it: a path, or a name that is there."""
        return ":" in name or name in self.built_in or name in self.all()

    def register(self, spec: S) -> None:
        """Add a spec in this process; recipes and files of this process may name it from now on.

        Raises:
            ConfigError: when another one has its name.
        """
        others = {**self.built_in, **vars(self).get("_installed", {}), **self._registered}
        if others.get(spec.name, spec) != spec:  # what is installed may be loading right now
            raise ConfigError(f"a second {self.kind} {spec.name!r}", "a name of its own")
        self._registered[spec.name] = spec

    def name_of(self, kind: type[Any]) -> str | None:
        """A name by which another process may find a class; ``None`` for one without.

        Names of this process alone come last, for the other one has to register them, too.
        """
        path = f"{kind.__module__}:{kind.__name__}"
        named = {**self.built_in, **self._installed}
        named |= {name: spec for name, spec in self._registered.items() if ":" in name}
        if getattr(kind, "section", None) is not None and _attribute(path) is kind:
            named[path] = self._spec_of(path, kind, path)
        named |= {name: spec for name, spec in self._registered.items() if ":" not in name}
        return next((name for name, spec in named.items() if spec.load() is kind), None)

    def find(self, name: str, may_import: bool = False) -> S:
        """The spec of that name.

        Args:
            name: or a path.
            may_import: whether the user gave the path, so that its module is imported; else it has
                to be there already, or be named in ``PIBROCH_IMPORT``.

        Raises:
            ConfigError: when there is none, or when a path leads to nothing of this kind.
        """
        spec = self.built_in.get(name) or self._registered.get(name)
        if spec is None and ":" in name:
            spec = self._registered[name] = self._by_path(name, may_import)
        spec = spec or self._installed.get(name)
        if spec is None:
            raise ConfigError(
                f"{self.kind} {name!r}",
                f"one of {sorted(self.all())}",
                "correct the name, or install here what has it",
            )
        return spec

    def _by_path(self, path: str, may_import: bool) -> S:
        module_name, _, attribute = path.partition(":")
        if may_import:
            module = _import(module_name, f"{self.kind} {path!r}")
            allow(module_name)
        elif module_name in _allowed():
            module = _import(module_name, f"{self.kind} {path!r}")
        elif module_name in sys.modules:
            module = sys.modules[module_name]
        else:
            raise ConfigError(
                f"{self.kind} {path!r}, named by a file; its module is not imported",
                "your consent, since to import a module is to run it",
                f"if you trust it, pass --import {module_name}, set {IMPORTS}={module_name}, or"
                " import it in your program",
            )
        target = vars(module).get(attribute)  # no getattr: a module's own would run
        if target is None:
            raise ConfigError(
                f"{self.kind} {path!r}, but {module_name} has no {attribute!r}",
                f"a class or a spec in {getattr(module, '__file__', module_name)}",
                "correct the name after the colon",
            )
        return self._spec_of(path, target, path)

    def _spec_of(self, path: str, target: object, name: str) -> S:
        """The spec that is meant: a spec itself, a package's ``SPEC``, or of a class."""
        if isinstance(target, ModuleType):
            target = vars(target).get("SPEC")
        if isinstance(target, self._spec):
            fields = (getattr(target, each) for each in self._spec.__dataclass_fields__)
            return target if ":" not in name else self._spec(name, *[*fields][1:])
        base = Spec("", "", Section, self._base).load()
        section = getattr(target, "section", None)
        if not (isinstance(target, type) and issubclass(target, base)):
            raise ConfigError(
                f"{self.kind} {path!r}, which is {_described(target)}",
                f"a class that derives from {self._base.replace(':', '.')}, or a"
                f" {self._spec.__name__}",
            )
        if not (isinstance(section, type) and issubclass(section, Section)):
            raise ConfigError(
                f"{self.kind} {path!r}, whose `section` is {_described(section)}",
                "its section: a class that derives from the one that its base has",
                f"write `section = MySection` into {target.__name__}",
            )
        summary = (target.__doc__ or target.__name__).partition("\n")[0]
        return self._spec(name, summary, section, target)


class Choice(Section):
    """A section whose fields depend on its ``name``.

    The base of a kind has the class variable ``registry``: a field of its type takes the section of
    whichever spec is named, and is written with all of that one's fields. A name alone is a section
    without settings.
    """

    registry: ClassVar[Registry[Any]]

    name: str

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Of the base of a kind, that of the section which is named; of others their own."""
        if "registry" not in cls.__dict__:
            return handler(source)
        as_it_is = core_schema.wrap_serializer_function_ser_schema(
            lambda value, serialise: serialise(value), schema=core_schema.any_schema()
        )
        return core_schema.with_info_plain_validator_function(cls._chosen, serialization=as_it_is)

    @classmethod
    def _chosen(cls, value: object, info: ValidationInfo) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise PydanticCustomError("union_tag_not_found", "a table with a `name`")
        default = cls.model_fields["name"].default
        name = value.get("name", default if isinstance(default, str) else None)
        registry = cls.registry
        if not isinstance(name, str) or not registry.has(name):
            names = ", ".join(map(repr, registry.all()))
            raise PydanticCustomError(
                "union_tag_invalid",
                "one of {expected_tags}",
                {"expected_tags": f"{names}, or 'module:Class' of your own"},
            )
        spec = registry.find(name, may_import=info.context != NO_FILES)
        raw = {**value, "name": name}
        section: Self = spec.section.model_validate(raw, context=info.context)
        return section


def _attribute(path: str) -> object:
    """What a path names, where its module is imported and not the program itself."""
    module_name, _, attribute = path.partition(":")
    module = sys.modules.get(module_name) if module_name != "__main__" else None
    return vars(module).get(attribute) if module else None


def _load(path: str) -> object:
    """What an entry point names: a module, or an attribute of one."""
    module, _, attribute = path.partition(":")
    loaded = import_module(module)
    return attrgetter(attribute)(loaded) if attribute else loaded


def _allowed() -> set[str]:
    return {name.strip() for name in os.environ.get(IMPORTS, "").split(",")} - {""}


def allow(*modules: str) -> None:
    """Let files name these modules, here and in processes that are started from here.

    The user has named them: to import a module is to run it.
    """
    os.environ[IMPORTS] = ",".join(sorted(_allowed().union(modules)))


def _import(name: str, what: str) -> ModuleType:
    # a user's own module lies there, and an installed command does not look there
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_module(name)
    except Exception as error:  # whatever a user's module may raise
        raise ConfigError(
            f"{what}, whose module cannot be imported: {type(error).__name__}: {error}",
            "a module on the Python path, or in the working directory",
            f"try python -c 'import {name}'",
        ) from error


def _described(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__name__}"
