"""Predicted steps as Chakra execution traces, a file a rank, which other simulators read.

Chakra: Sridharan et al., "Chakra: Advancing Performance Benchmarking and Co-design using
Standardized Execution Traces", 2023; its schema is ``schema/protobuf/et_def.proto`` of MLCommons,
whose numbers of fields are below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.sim.program import Program, Span
from pibroch.storage import storage_errors
from pibroch.version import __version__

SCHEMA = "0.0.4"
COMP_NODE = 4
COMM_COLL_NODE = 7
ALL_REDUCE = 0
ALL_TO_ALL = 6
Value = bool | int | str
_PACKAGE = "ChakraProtoMsg"
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "AttributeProto": {
        "name": (1, "string"),
        "int64_val": (9, "int64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "repeated AttributeProto")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),  # an enumeration, which travels as one
        "data_deps": (5, "repeated uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "repeated AttributeProto"),
    },
}


@dataclass(slots=True)
class _Node:
    """What each rank does once, and the numbers of what it waits for."""

    number: int
    span: Span
    after: frozenset[int]

    def fields(self, rank: int) -> dict[str, Any]:
        """Of the node of a rank."""
        return {
            "id": self.number,
            "name": self.span.name,
            "type": COMP_NODE if self.span.sent is None else COMM_COLL_NODE,
            "data_deps": sorted(self.after),
            "duration_micros": round(1e6 * float(self.span.seconds[rank])),
        }

    def attributes(self, rank: int) -> dict[str, Value]:
        """What simulators know by these names."""
        sent = self.span.sent
        if sent is None:
            return {"is_cpu_op": True}
        kind = ALL_TO_ALL if sent.summed is None else ALL_REDUCE
        of_ranks = sent.flow.out if sent.summed is None else sent.summed
        known: dict[str, Value] = {"is_cpu_op": False, "comm_type": kind}
        known["comm_size"] = int(of_ranks[rank])
        if len(sent.groups) > 1:
            group = next(n for n, members in enumerate(sent.groups) if rank in members)
            known["pg_name"] = str(group)
        return known


@dataclass(slots=True)
class _Graph:
    """The spans of a program that take time or send something, and their order."""

    nodes: list[_Node] = field(default_factory=list)
    _ended_by: dict[int, frozenset[int]] = field(default_factory=dict)
    _of_thread: dict[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> _Graph:
        """What only waits becomes the order of what comes after it."""
        graph = cls()
        for span in spans:
            before = [graph._of_thread.get(span.thread, frozenset())]
            before += [graph._ended_by.get(int(each[0]), frozenset()) for each in span.after]
            after = frozenset().union(*before)
            if span.sent is not None or span.seconds.any():
                graph.nodes.append(_Node(len(graph.nodes), span, after))
                after = frozenset([len(graph.nodes) - 1])
            graph._of_thread[span.thread] = after
            graph._ended_by[int(span.tasks[0])] = after
        return graph


def make_folder(folder: Path) -> None:
    """Create a folder for traces, before time is spent on them.

    Raises:
        ConfigError: for one that has something in it.
        MissingDependencyError: without protobuf.
        StorageError: where it cannot be.
    """
    _Messages()
    with storage_errors(folder, do="pass --traces FOLDER"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--traces {folder}, which is there", "a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)


def write_traces(program: Program, folder: Path) -> None:
    """Write ``RANK.et`` for each rank.

    A piece of work is a compute node with its time in whole microseconds, rounded; messages are an
    all-to-all with the bytes that the rank sends, sums of dense gradients an all-reduce with those
    of the gradients. Threads of a rank and waits are dependencies.

    Raises:
        StorageError: where they cannot be written.
    """
    messages = _Messages()
    graph = _Graph.of(program.spans)
    size = program.cluster.num_ranks
    for rank in range(size):
        told = f"pibroch {__version__}, predicted: rank {rank} of {size}"
        path = folder / f"{rank}.et"
        with storage_errors(path, do="pass --traces FOLDER"), path.open("wb") as file:
            messages.write(file, "GlobalMetadata", {"version": SCHEMA}, {"generator": told})
            for node in graph.nodes:
                messages.write(file, "Node", node.fields(rank), node.attributes(rank))


class _Messages:
    """Messages of the schema, by protobuf."""

    def __init__(self) -> None:
        try:
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
        except ImportError as error:
            raise MissingDependencyError(
                "no module google.protobuf",
                "protobuf 5.29 or later",
                "pip install 'pibroch[traces]'",
            ) from error
        self._proto = proto
        described = descriptor_pb2.FileDescriptorProto(
            name="et_def.proto", package=_PACKAGE, syntax="proto3"
        )
        for name, fields in _MESSAGES.items():
            message = described.message_type.add(name=name)
            for field_name, (number, kind) in fields.items():
                *repeated, kind = kind.split()
                added = message.field.add(name=field_name, number=number)
                label = "LABEL_REPEATED" if repeated else "LABEL_OPTIONAL"
                added.label = getattr(added, label)
                if kind in _MESSAGES:
                    added.type = added.TYPE_MESSAGE
                    added.type_name = f".{_PACKAGE}.{kind}"
                else:
                    added.type = getattr(added, f"TYPE_{kind.upper()}")
        attribute = described.message_type[0]  # has one value, which is written even if it is 0
        attribute.oneof_decl.add(name="value")
        for each in attribute.field[1:]:
            each.oneof_index = 0
        pool = descriptor_pool.DescriptorPool()
        pool.Add(described)
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in _MESSAGES
        }

    def write(
        self,
        file: BinaryIO,
        kind: str,
        fields: Mapping[str, object],
        attributes: Mapping[str, Value],
    ) -> None:
        """Append a message with its length before it."""
        of_class = {bool: "bool_val", int: "int64_val", str: "string_val"}
        values = [
            self._classes["AttributeProto"](name=key, **{of_class[type(value)]: value})
            for key, value in attributes.items()
        ]
        message = self._classes[kind](attr=values, **fields)
        self._proto.serialize_length_prefixed(message, file)
