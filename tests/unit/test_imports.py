"""Imports point one way (design, section 3).

Pure cores touch no clock, thread, socket or process group.
"""

import ast
import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pibroch

PACKAGE = Path(pibroch.__file__).parent
LAYERS = [
    {
        "errors",
        "untrusted",
        "overlap",
        "version",
        "torch_backend",
        "process",
        "title",
        "ports",
        "host",
        "integers",
        "stores",
        "secret_file",
        "storage",
        "config",
        "forkserver",
    },
    {"data", "kernels", "observability"},
    {"embedding", "models", "wire"},
    {"planner", "rpc", "collectives", "state", "assignment", "exchange.lookahead.oracle"},
    {"roles"},
    {"launch"},
    {"servers", "processors"},
    {"exchange"},
    {"train", "serve", "sim", "torchrec", "metrics"},
    {"score", "observability.exposition"},
    {"cli", "__main__"},
]
"""Rooms by their layer.

The oracle lies with the exchange that it plans for, but below it: servers keep oracles as well.
Figures over HTTP lie with the other sinks, but above them: they are answered by `serve`'s server.
"""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def room_of(module):
    """The room that a module, named without ``pibroch``, belongs to; of two the inner one.

    >>> room_of("exchange.lookahead.oracle.joint"), room_of("exchange.lookahead.build")
    ('exchange.lookahead.oracle', 'exchange')
    """
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVEL), parts[0])


def room_of_file(path):
    return room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            package, _, module = name.partition(".")
            if package == "pibroch" and room_of(module) in LEVEL:
                yield room_of(module), node.lineno


def test_every_room_has_its_place():
    assert {room_of_file(path) for path in FILES} <= set(LEVEL)


def test_training_and_serving_do_not_know_each_other():
    beside = {"train": "serve", "serve": "train", "state": "exchange"}
    assert not [
        f"{path.relative_to(PACKAGE)}:{line} imports {other}"
        for path in FILES
        for other, line in rooms_imported(path)
        if beside.get(room_of_file(path)) == other
    ]


def test_imports_point_down():
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {other}, which stands above it"
        for path in FILES
        for other, line in rooms_imported(path)
        if LEVEL[other] > LEVEL[room_of_file(path)]
    ]
    assert not upward


PURE = [
    "pibroch.collectives.bounded_lag.window",
    "pibroch.exchange.lookahead.window",
    "pibroch.sim.kernels.events.naive",
    "pibroch.sim.kernels.events.numba",
    "pibroch.exchange.lookahead.oracle.kernels.window.naive",
    "pibroch.exchange.lookahead.oracle.kernels.window.numba",
    "pibroch.exchange.lookahead.oracle.encoding",
    "pibroch.exchange.lookahead.oracle.oracle",
    "pibroch.exchange.lookahead.oracle.requests",
    "pibroch.planner.bound",
    "pibroch.planner.diff",
    "pibroch.planner.extrapolate",
    "pibroch.planner.drift",
    "pibroch.planner.make",
    "pibroch.planner.sketch",
    "pibroch.rpc.autograd.discovery",
    "pibroch.sim.timeline",
]
"""Algorithms: events in, instructions out.

Nothing that they import, at any distance, may be one of IMPURE.
"""
IMPURE = {
    "asyncio", "concurrent", "multiprocessing", "queue", "select", "selectors", "socket",
    "subprocess", "threading", "time", "torch.distributed",
}  # fmt: skip


def modules_imported(name):
    """Names of modules that a module imports when it is loaded.

    Those under TYPE_CHECKING are left out.
    """
    tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text())
    for node in [*tree.body]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_pure_cores_know_no_sockets_threads_clocks_or_process_groups():
    seen = set()
    left = [*PURE]
    impure = []
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        for imported in modules_imported(module):
            if {imported, imported.partition(".")[0]} & IMPURE:
                impure.append(f"{module} imports {imported}")
            if imported.startswith("pibroch.") and is_module(imported):
                left.append(imported)
    assert not impure


EXCHANGE_PACKAGES = sorted(
    path.parent
    for path in (PACKAGE / "exchange").glob("*/__init__.py")
    if "SPEC" in path.read_text()
)


def test_what_an_exchange_says_of_itself_loads_nothing_of_it():
    for package in EXCHANGE_PACKAGES:
        rooms = {
            ".".join(name.split(".")[:2])
            for name in modules_imported(f"pibroch.exchange.{package.name}")
            if name.startswith("pibroch")
        }
        assert rooms == {"pibroch.config"}, package.name


OPERATIONS = sorted(path.parent for path in PACKAGE.glob("**/kernels/*/__init__.py"))
WITHOUT_NAIVE = {"ring", "mailbox", "words"}
"""What these mean is an order between processes, which plain NumPy does not have."""


def test_nobody_but_kernels_names_an_implementation():
    operations = {".".join(path.relative_to(PACKAGE.parent).parts) for path in OPERATIONS}
    fronts = operations | {
        f"{front}.{name}" for front in operations for name in import_module(front).__all__
    }
    outside = [path for path in FILES if "kernels" not in path.parts]
    for path in outside:
        tree = ast.parse(path.read_text())
        for name in names_imported(tree):
            parts = name.split(".")
            is_inside = any(".".join(parts[:length]) in operations for length in range(len(parts)))
            assert not is_inside or name in fronts, f"{path}: {name}"
            assert name != "pibroch.kernels.policy.kernel", f"{path} compiles a kernel of its own"
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & {"naive", "numba", "triton"}, path


def names_imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_operations_say_what_they_mean():
    without = {path.name for path in OPERATIONS if not (path / "naive.py").exists()}
    assert without == WITHOUT_NAIVE


WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any((name + ".").startswith(f"pibroch.{{room}}.") for room in {rooms!r}):
            raise ImportError(f"{{name}} is not here")
sys.meta_path.insert(0, Refuse())
"""
PROGRAM = """
import torch, pibroch as pb
embeddings = pb.Embeddings([pb.Table("item", 50, 8)], pb.Adagrad(lr=0.5), exchange="local")
ids = torch.arange(400).view(1, -1) % 50
batch = pb.JaggedBatch.from_one_hot(torch.zeros(400, 0), ["item"], ids, (ids[0] % 3 == 0).float())
for _ in range(20):
    logits = embeddings(batch)[:, 0].sum(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()
print(loss.item())
"""
TRAIN = """
from pibroch.cli.main import main
settings = ["--set", "train.epochs=1", "--set", "data.synthesize.rows=2000"]
sys.argv = ["pibroch", "train", "--run-dir", {run!r}, *settings]
main()
"""


def run_without(rooms, program):
    command = [sys.executable, "-c", WITHOUT.format(rooms=rooms) + program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_one_process_trains_without_rpc_servers_roles_and_processors():
    rooms = ["rpc", "servers", "roles", "processors", "exchange.lookahead.oracle"]
    assert float(run_without(rooms, PROGRAM)) < 0.4


def test_tables_load_neither_compilers_of_models_nor_data_frames():
    """They cost a second and a half of CPU, in each rank and each server worker."""
    program = "import sys, pibroch as pb; pb.Embeddings; print(*sys.modules, sep=chr(10))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pibroch.exchange.embeddings" in ran.stdout.split(), ran.stderr
    assert not {"torch._dynamo", "polars", "sympy"} & {*ran.stdout.split()}


def test_the_command_line_trains_in_one_process_without_rpc(tmp_path):
    output = run_without(
        ["rpc", "servers", "processors", "exchange.lookahead.oracle"],
        TRAIN.format(run=str(tmp_path / "run")),
    )
    assert "AUC" in output
