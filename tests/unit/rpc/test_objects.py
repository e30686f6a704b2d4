"""Objects of users' classes arrive as they were sent: nothing of them is worked out again."""

import abc
import dataclasses
import enum
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import pytest
import torch

from pibroch.data import JaggedBatch
from pibroch.errors import NotAllowedError, ProtocolError
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Code, Codec

T = TypeVar("T")
BATCH = "pibroch.data.batch:JaggedBatch"
CODEC = Codec(Callables((__name__, BATCH, "pibroch.rpc")))
pack = msgspec.msgpack.encode


def there_and_back(value):
    raw, tensors, references = CODEC.encode(value)
    return CODEC.decode(msgspec.Raw(bytes(raw)), tensors, references)


def arriving(cls, state):
    """A peer's bytes of an object of a class."""
    name = cls if isinstance(cls, str) else f"{__name__}:{cls.__qualname__}"
    data = pack(msgspec.msgpack.Ext(Code.OBJECT, pack([name, state])))
    return CODEC.decode(msgspec.Raw(data))


class Bits(enum.IntFlag):
    """Takes unknown bits, each of which makes a member that stays for the life of the class."""

    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Shifted:
    ids: Any
    offset: int = 100

    def __post_init__(self):
        self.ids = self.ids + self.offset

    @functools.cached_property
    def doubled(self):
        return self.ids * 2

    @property
    def tripled(self):
        return self.ids * 3

    def method(self):
        return 1


@dataclasses.dataclass
class Scaled:
    values: Any
    scale: dataclasses.InitVar[int]
    total: int = dataclasses.field(init=False)

    def __post_init__(self, scale):
        self.values = self.values * scale
        self.total = scale


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    number: int

    def __post_init__(self):
        object.__setattr__(self, "number", self.number + 1)


@dataclasses.dataclass(slots=True)
class OfSlots:
    items: list = dataclasses.field(default_factory=list)
    unset: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Behind(Shifted):
    """With its number behind a property."""

    _x: int = 0
    log: list = dataclasses.field(default_factory=list)

    def __setattr__(self, name, item):
        if "log" in vars(self):
            self.log.append(name)
        object.__setattr__(self, name, item)

    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._x = -value


@dataclasses.dataclass
class Boxed(Generic[T]):
    content: T


@dataclasses.dataclass
class Failed(Exception):
    code: int

    def __post_init__(self):
        super().__init__(f"failed with {self.code}")


@dataclasses.dataclass
class Closed:
    name: str
    lock: Any = dataclasses.field(default_factory=object)

    def __getstate__(self):
        return [self.name]

    def __setstate__(self, state):
        (self.name,) = state
        self.lock = "a new one"


@dataclasses.dataclass
class Lean:
    """Leaves out what cannot travel, and says nothing of what arrives."""

    a: int
    lock: Any

    def __getstate__(self):
        return {"a": self.a}


@dataclasses.dataclass
class Module(torch.nn.Module):
    width: int

    def __post_init__(self):
        super().__init__()
        self.layer = torch.nn.Parameter(torch.full((self.width,), 0.5))

    __hash__ = object.__hash__


class Point(NamedTuple):
    x: int
    y: int = 0


class Shown(Point):
    def __new__(cls, x, y=0):
        return super().__new__(cls, x + 1, y)


class Answer(enum.IntEnum):
    YES = 1

    @classmethod
    def _missing_(cls, value):
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class Word(enum.Enum):
    YES = "yes"

    @classmethod
    def _missing_(cls, value):
        return cls.YES


@dataclasses.dataclass
class Listed(list):
    a: int


@dataclasses.dataclass
class Abstract(abc.ABC):
    a: int

    @abc.abstractmethod
    def work(self):
        """Somebody's."""


def same_state(a, b):
    return type(a) is type(b) and {k: str(v) for k, v in vars(a).items()} == {
        k: str(v) for k, v in vars(b).items()
    }


def test_nothing_is_worked_out_again_however_often_it_travels():
    sent = Shifted(torch.tensor([7]))
    sent.name, sent._private = "mine", [1]
    assert sent.doubled.item() == 214
    back = there_and_back(there_and_back(there_and_back(sent)))
    assert same_state(back, sent) and back.ids.item() == 107 and vars(back)["doubled"] == 214
    scaled = there_and_back(Scaled(torch.tensor(3), 2))
    assert scaled.values.item() == 6 and scaled.total == 2
    assert there_and_back(Counted(1)).number == 2
    behind = Behind(1)
    behind.x = 5
    back = there_and_back(behind)
    assert same_state(back, behind) and back.x == -5 and back.log == behind.log


def test_slots_that_are_not_set_stay_so():
    sent = OfSlots([1])
    back = there_and_back(sent)
    assert back.items == [1] and not hasattr(back, "unset")
    sent.unset = 4
    assert there_and_back(sent).unset == 4


def test_a_class_that_has_its_own_state_keeps_it():
    back = there_and_back(Closed("a"))
    assert (back.name, back.lock) == ("a", "a new one")
    lean = there_and_back(Lean(3, object()))
    assert vars(lean) == {"a": 3}
    assert there_and_back(Boxed[int](5)) == Boxed(5)
    failed = there_and_back(Failed(3))
    assert failed.code == 3 and str(failed) == "failed with 3"
    module = Module(2)
    module.layer.data.fill_(3.0)
    assert there_and_back(module).layer.tolist() == [3.0, 3.0]


def test_named_tuples_and_members_of_enums():
    shown = Shown(1, 2)
    assert there_and_back(shown) == shown == (2, 2) and type(there_and_back(shown)) is Shown
    shown.label = "mine"
    assert there_and_back(shown).label == "mine"
    unknown = there_and_back(Answer(5))
    assert unknown == 5 and unknown.name == "UNKNOWN_5" and type(unknown) is Answer
    assert there_and_back(Answer.YES) is Answer.YES
    assert there_and_back(Word("no")) is Word.YES
    assert there_and_back(Bits.ONE | Bits.TWO) is Bits.ONE | Bits.TWO


@pytest.mark.parametrize(
    ("cls", "state"),
    [
        (Shifted, {"ids": 1, "method": 2}),
        (Shifted, {"ids": 1, "tripled": 2}),
        (Shifted, {"ids": 1, "__class__": 2}),
        (Shifted, {"ids": 1, "__reduce__": 2}),
        (Shifted, {"ids": 1, "not a name": 2}),
        (Shifted, {"ids": 1, 3: 2}),
        (Shifted, {"offset": 1}),
        (Shifted, [1, 2]),
        (Shifted, 1),
        (Counted, {"number": 1, "more": 2}),
        (Counted, {}),
        (Counted, [1]),
        (Closed, [1, 2]),
        (Abstract, {"a": 1}),
        (Listed, {"a": 1}),
        (Shown, [1, 2, 3]),
        (Shown, [1]),
        (Answer, ["text"]),
        (Bits, 8),
        (Bits, 9),
        (Bits, -2),
        (Failed, {"code": 1, "args": 5}),
        (Failed, {"code": 1, "with_traceback": 5}),
    ],
)
def test_what_would_break_a_class_is_refused(cls, state):
    with pytest.raises((ProtocolError, NotAllowedError)):
        arriving(cls, state)


def test_a_dataclass_whose_content_is_no_attribute_is_refused_where_it_is_sent():
    with pytest.raises(NotAllowedError, match="Listed that is a list as well"):
        CODEC.encode(Listed(1))


def test_dataclasses_of_this_package_are_built_and_checked():
    assert there_and_back(WorkerInfo("a", 1)) == WorkerInfo("a", 1)
    with pytest.raises((ProtocolError, NotAllowedError), match="name"):
        arriving("pibroch.rpc.info:WorkerInfo", {"name": "", "id": 1})
    batch = JaggedBatch.from_one_hot(torch.empty(1, 0), ["a"], torch.tensor([[5]]), torch.zeros(1))
    assert there_and_back(batch).values.tolist() == [5]
    object.__setattr__(batch, "offsets", torch.tensor([0, 1 << 40]))
    with pytest.raises(ProtocolError, match="last offset"):
        there_and_back(batch)


class Own(WorkerInfo):
    """A user's, below one of this package's."""


def test_what_is_below_a_dataclass_of_this_package_has_its_fields_alone():
    own = Own("a", 1)
    assert there_and_back(own) == own
    object.__setattr__(own, "beside", 1)
    with pytest.raises(NotAllowedError, match="attribute 'beside' of a Own; need its fields"):
        CODEC.encode(own)
    with pytest.raises(ProtocolError):
        arriving(Own, {"name": "a", "id": 1, "beside": 1})
