"""Names of callables, and what peers may name."""

import functools
import operator
import subprocess
import sys
import types
from os import system

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.errors import ConfigError, NotAllowedError
from pibroch.rpc.values import callables as callables_module
from pibroch.rpc.values.callables import Callables, default_modules
from pibroch.rpc.values.known_callables import known_callables

HERE = __name__


def function(x):
    return x


def _own():
    return "own"


def __private():
    return 1


class Outer:
    held = subprocess.Popen
    size = 3

    class Inner:
        def method(self):
            return 1

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls

    def _hidden(self):
        return 1

    def __call__(self):
        return 1


class Below(Outer):
    pass


class Threads(subprocess.Popen):
    pass


@functools.lru_cache
def cached(x):
    return x


@functools.wraps(function)
def wrapping(x):
    return x


@torch.no_grad()
def without_gradient(x):
    return x


@torch.jit.script
def scripted(x):
    return x + 1


instance = Outer()
run = functools.partial(system)
shell = subprocess.run
alias = function
nothing = None


@pytest.fixture
def callables():
    return Callables((HERE, "pibroch.rpc"))


@pytest.mark.parametrize(
    "value",
    [
        function,
        Outer,
        Outer.Inner,
        Outer.Inner.method,
        Outer.static,
        Outer.of_class,
        Below,
        Below.of_class,
        cached,
        without_gradient,
        scripted,
    ],
    ids=lambda value: getattr(value, "__qualname__", "?"),
)
def test_there_and_back(callables, value):
    name = callables.name(value)
    assert name.startswith(f"{HERE}:") and callables.resolve(name) == value
    assert callables.name(value) == name and callables.resolve(name) == value  # from the caches too


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.add, "torch:add"),
        (torch.sum, "torch:sum"),
        (torch.Tensor.add, "torch:Tensor.add"),
        (torch.Tensor.add_, "torch:Tensor.add_"),
        (torch.optim.SGD, "torch.optim:SGD"),
        (operator.add, "operator:add"),
        (len, "builtins:len"),
        (range, "builtins:range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_known_ones_need_no_allowed_module(value, name):
    callables = Callables(())
    assert callables.name(value) == name
    assert callables.resolve(name) is value
    called = callables.to_call(name)
    assert called is value or called.__wrapped__ is value


def test_every_known_callable_resolves_and_has_a_name():
    callables = Callables(())
    for name, value in known_callables().items():
        assert callables.resolve(name) is value
        assert known_callables()[callables.name(value)] is value


def test_names_of_the_spawned_main_program_are_those_of_the_main_program(monkeypatch):
    spawned = types.ModuleType("__mp_main__")
    exec("def work(): return 'spawned'", vars(spawned))
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    callables = Callables(("__main__",))
    assert callables.name(spawned.work) == "__main__:work"
    assert callables.resolve("__main__:work") is spawned.work
    assert Callables(("__mp_main__",)).resolve("__main__:work") is spawned.work


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (lambda x: x, "module level"),
        (functools.partial(function, 1), "of the partial"),
        (instance.Inner().method, "RRef"),
        (Outer(), "function or class"),
        (wrapping.__wrapped__.__get__(3), "RRef"),
        (__private, "public name"),
        (Outer.__call__, "public name"),
        ([].append, "function or class"),
        (3, "function or class"),
        (None, "function or class"),
        (sys, "function or class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_name_is_refused_where_it_is_sent_with_advice(callables, value, advice):
    with pytest.raises(NotAllowedError, match=advice):
        callables.name(value)


def test_a_function_inside_a_function_is_refused_where_it_is_sent(callables):
    def inner():
        return 1

    with pytest.raises(NotAllowedError, match="inside another function"):
        callables.name(inner)


def test_a_name_that_leads_elsewhere_is_refused_where_it_is_sent(callables):
    with pytest.raises(NotAllowedError, match="something else"):
        callables.name(wrapping)  # says that it is `function`
    made = types.FunctionType(function.__code__, {}, "gone")
    made.__module__ = HERE
    made.__qualname__ = "gone"
    with pytest.raises(NotAllowedError, match="nothing"):
        callables.name(made)


@pytest.mark.parametrize(
    "qualname",
    [
        "system",  # imported, not defined here
        "loads",
        "shell",
        "subprocess",
        "subprocess.Popen",
        "sys.exit",
        "run",
        "Outer.held",
        "Outer.size",
        "Outer.mro",
        "Outer.missing",
        "Outer.Inner.missing",
        "Outer.__call__",
        "Outer.__init__",
        "Outer.__subclasses__",
        "__private",
        "__builtins__",
        "__loader__",
        "__class__",
        "function.__globals__",
        "function.__call__",
        "function.x",
        "instance",
        "instance.static",
        "Threads.communicate",  # inherited from elsewhere
        "test_there_and_back.<locals>.x",
        "<lambda>",
        "missing",
        "nothing",
        "HERE",
        "",
        ".",
        "function.",
        ".function",
        "function:x",
        "func tion",
        "function\n",
        "x" * 600,
    ],
)
def test_peers_reach_only_what_is_defined_here(callables, qualname):
    with pytest.raises(NotAllowedError):
        callables.resolve(f"{HERE}:{qualname}")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "posix:system",
        "subprocess:Popen",
        "builtins:eval",
        "pibroch.rpc.api:shutdown",
        "pibroch.rpc.api:init_rpc",
        "pibroch.rpc.functions:run",
        "pibroch.rpc.autograd.engine:Autograd",
        "pibroch.rpc.references.table:ReferenceTable",
        "torch:Generator",
        "torch:as_strided",
        "torch:segment_reduce",
        "torch:embedding_bag",
        "torch:lu_solve",
        "torch:sparse_coo_tensor",
        "torch:sparse_csr_tensor",
        "torch:empty_strided",
        "torch:empty_quantized",
        "torch:quantize_per_tensor",
        "torch:Tensor.as_strided",
        "torch:Tensor.set_",
        "torch:Tensor.resize_",
        "torch:Tensor.new",
        "torch:Tensor.apply_",
        "torch:Tensor.register_hook",
        "torch:Tensor.to_mkldnn",
        "torch.linalg:lu_solve",
        "torch.linalg:ldl_solve",
        "torch.nn:CTCLoss",
        "torch.nn.functional:ctc_loss",
        "torch.special:chebyshev_polynomial_t",
        "builtins:exec",
        "builtins:open",
        "builtins:getattr",
        "builtins:setattr",
        "builtins:type",
        "builtins:object",
        "builtins:format",
        "builtins:print",
        "builtins:str.format",
        "builtins:__import__",
        "operator:attrgetter",
        "operator:methodcaller",
        "operator:itemgetter",
        "_operator:add",
        "pickle:loads",
        "torch:load",
        "torch:save",
        "torch:from_file",
        "torch:frombuffer",
        "torch:compile",
        "torch:ops",
        "torch:classes",
        "torch:hub",
        "torch:os",
        "torch:sys",
        "torch:import_ir_module",
        "torch.hub:load",
        "torch.serialization:load",
        "torch.jit:load",
        "torch.jit:script",
        "torch.package:PackageImporter",
        "torch.library:Library",
        "torch.ops:load_library",
        "torch.utils.cpp_extension:load_inline",
        "torch.utils.data:DataLoader",
        "torch.nn:Module.share_memory",
        "torch.nn:functional",
        "torch.nn.functional:torch",
        "torch.nn.functional:importlib",
        "torch.nn.functional:handle_torch_function",
        "torch.nn.functional:boolean_dispatch",
        "torch:Tensor.share_memory_",
        "torch:Tensor.data_ptr",
        "torch:Tensor.storage",
        "torch:Tensor.__reduce_ex__",
        "torch:Tensor.__class__",
        "torch:UntypedStorage.from_file",
        "torch:FloatStorage",
        "torch.optim.lr_scheduler:partial",
        "torch.distributed:init_process_group",
        "pibroch.wire.secret:find_secret",
        "pibroch.rpc.calls.agent:Agent",
        "pibroch.rpc.values.callables:Callables",
        "pibroch.wire.handshake:Server",
        "pibroch.errors:ConfigError",
        f"{HERE}x:function",
        "no.such.module:function",
        "",
        ":",
        "a",
        ":a",
        "a:",
    ],
)
def test_peers_do_not_reach_other_modules(callables, name):
    with pytest.raises(NotAllowedError):
        callables.resolve(name)


def test_what_a_module_imported_of_this_package_is_not_reached_through_it(monkeypatch):
    module = types.ModuleType("importing")
    exec("from pibroch.rpc import shutdown, rpc_sync", vars(module))
    monkeypatch.setitem(sys.modules, "importing", module)
    callables = Callables(("importing", "pibroch.rpc"))
    assert callables.resolve("importing:rpc_sync") is module.rpc_sync
    with pytest.raises(NotAllowedError):
        callables.resolve("importing:shutdown")


def test_a_user_may_allow_a_single_name():
    callables = Callables(("torch:segment_reduce", "os.path:join"))
    assert (
        callables.resolve("torch:segment_reduce")
        is callables.to_call("torch:segment_reduce")
        is torch.segment_reduce
    )
    assert callables.name(torch.segment_reduce) == "torch:segment_reduce"
    with pytest.raises(NotAllowedError):
        callables.resolve("os.path:split")
    with pytest.raises(ConfigError, match="torch:no_such"):
        Callables(("torch:no_such",))


def test_the_refusal_names_the_option():
    with pytest.raises(NotAllowedError, match=r"'os:system'.*allowed_modules of this worker"):
        Callables(("mine",)).resolve("os:system")


def test_no_file_and_no_storage_among_the_known():
    reach = (
        "file",
        "load",
        "save",
        "storage",
        "pickle",
        "import",
        "ptr",
        "shared",
        "share_memory",
        "compile",
        "hub",
        "package",
    )
    names = {name.partition(":")[2].lower() for name in known_callables()}
    assert not {name for name in names if any(word in name for word in reach)}


def test_below_an_allowed_package_but_not_beside_it():
    callables = Callables(("mine.sub",))
    assert callables.allows("mine.sub") and callables.allows("mine.sub.more")
    assert (
        not callables.allows("mine")
        and not callables.allows("mine.subway")
        and not callables.allows(None)
    )


@pytest.mark.parametrize("module", ["torch", "builtins", ""])
def test_modules_that_hold_everything_cannot_be_allowed(module):
    with pytest.raises(ConfigError):
        Callables((module,))


def test_only_importable_modules_are_imported(tmp_path, monkeypatch):
    package = tmp_path / "fresh_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text("def go(): return 'went'\n")
    (package / "broken.py").write_text("import no_such_module\n")
    (package / "__main__.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAllowedError, match="not imported here"):
        Callables(("fresh_package",)).resolve("fresh_package.work:go")
    assert "fresh_package" not in sys.modules
    importing = Callables(("fresh_package",), importable=("fresh_package",))
    try:
        assert importing.resolve("fresh_package.work:go")() == "went"
        with pytest.raises(NotAllowedError, match="cannot be imported"):
            importing.resolve("fresh_package.broken:go")
        with pytest.raises(NotAllowedError, match="private"):
            importing.resolve("fresh_package.__main__:go")
        with pytest.raises(NotAllowedError, match="cannot be imported"):
            importing.resolve("fresh_package.missing:go")
    finally:
        for name in [name for name in sys.modules if name.startswith("fresh_package")]:
            del sys.modules[name]


def test_a_function_that_was_defined_anew_is_found(monkeypatch):
    module = types.ModuleType("notebook")
    exec("def cell(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "notebook", module)
    callables = Callables(("notebook",))
    assert callables.resolve("notebook:cell")() == 1
    exec("def cell(): return 2", vars(module))
    assert callables.resolve("notebook:cell")() == 2


def test_caches_are_bounded(monkeypatch):
    monkeypatch.setattr(callables_module, "MAX_CACHED", 3)
    callables = Callables((HERE,))
    for value in (function, Outer, Below, cached, without_gradient, Outer.static):
        callables.resolve(callables.name(value))
    assert len(callables._names) <= 3 and len(callables._resolved) <= 3


@pytest.mark.parametrize(
    ("caller", "package"),
    [
        ("mine.sub.module", "mine"),
        ("mine", "mine"),
        ("__main__", None),
        ("__mp_main__", None),
        ("runpy", None),
        ("torch.distributed.run", None),
        ("multiprocessing.process", None),
        ("pibroch.servers.group", None),
    ],
)
def test_by_default_the_callers_package_but_no_launcher(caller, package):
    assert default_modules(caller) == ("__main__", "pibroch.rpc", *([package] if package else []))


@settings(max_examples=500, deadline=None)
@given(
    st.text(max_size=40)
    | st.builds(
        ":".join,
        st.tuples(
            st.sampled_from([HERE, "torch", "builtins", "os", "__main__"]), st.text(max_size=30)
        ),
    )
)
def test_any_text_is_refused_with_a_named_error(name):
    if name in known_callables():
        return
    with pytest.raises(NotAllowedError):
        Callables((HERE,)).resolve(name)


def test_names_with_one_underscore_are_a_users_own_to_give(callables):
    for function, name in ((_own, f"{HERE}:_own"), (Outer._hidden, f"{HERE}:Outer._hidden")):
        assert callables.name(function) == name
        assert callables.resolve(name) is function


@pytest.mark.parametrize(
    "name", ["torch:_assert", "torch.nn:_reduction", "numpy:_mat", "builtins:_x", "pibroch:_own"]
)
def test_private_names_of_libraries_stay_private_whatever_is_allowed(name):
    with pytest.raises(NotAllowedError, match="private"):
        Callables(("torch.nn", "numpy", "pibroch", "operator")).resolve(name)
