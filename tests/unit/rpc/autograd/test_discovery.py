"""The search over random graphs of messages, with answers and questions delivered in any order."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pibroch.rpc.autograd.discovery import Discovery, Edge, SearchAnswer, SearchRequest
from pibroch.rpc.info import WorkerInfo

ERROR = ValueError("lost")


@st.composite
def message_graphs(draw):
    """Workers, edges between them, and for each edge the earlier ones that its sender reaches."""
    workers = [WorkerInfo(f"worker{each}", each) for each in range(draw(st.integers(1, 5)))]
    pick = st.sampled_from(workers)
    edges = []
    holders = {}
    behind = {}
    for message in range(draw(st.integers(0, 25))):
        edge = Edge(draw(pick), message // 2, message % 2)  # messages have up to two tensors
        holders[edge] = draw(pick)
        at_sender = [each for each in edges if holders[each] == edge.origin]
        behind[edge] = draw(st.lists(st.sampled_from(at_sender), max_size=4)) if at_sender else []
        edges.append(edge)
    root = draw(pick)
    at_root = [each for each in edges if holders[each] == root]
    reached = draw(st.lists(st.sampled_from(at_root), max_size=5)) if at_root else []
    return workers, holders, behind, root, reached


class Net:
    """Delivers what the searches of all workers say, one thing at a time."""

    def __init__(self, graph):
        workers, self.holders, self.behind, self.root, self.at_root = graph
        self.parts = {worker: Discovery(worker) for worker in workers}
        self.under_way = []
        self.asked = Counter()
        self.answers = []

    def begin(self):
        self.do(self.root, self.parts[self.root].requested("user", self.at_root))

    def do(self, worker, instructions):
        for each in instructions:
            if isinstance(each, SearchRequest):
                self.asked.update(each.edges)
                self.under_way.append((worker, each))
            elif each.requester == "user":
                self.answers.append(each)
            else:
                self.under_way.append((worker, each))

    def deliver(self, index, fails=False):
        origin, what = self.under_way.pop(index % len(self.under_way))
        if isinstance(what, SearchRequest):
            if fails:  # the worker asked was lost
                self.do(origin, self.parts[origin].failed(ERROR))
                return
            reached = [each for edge in what.edges for each in self.behind[edge]]
            self.do(what.worker, self.parts[what.worker].requested(origin, reached))
        elif what.error is not None:
            self.do(what.requester, self.parts[what.requester].failed(what.error))
        else:
            self.do(what.requester, self.parts[what.requester].answered(what.workers))

    def reachable(self):
        seen = set()
        stack = [*self.at_root]
        while stack:
            edge = stack.pop()
            if edge not in seen:
                seen.add(edge)
                stack += self.behind[edge]
        return seen


@given(message_graphs(), st.data())
def test_every_edge_that_takes_part_is_asked_for_once_and_the_end_is_known(graph, data):
    net = Net(graph)
    net.begin()
    while net.under_way:
        assert not net.answers  # not before all is done
        net.deliver(data.draw(st.integers(0, len(net.under_way) - 1)))
    reachable = net.reachable()
    assert net.asked == Counter(reachable)
    [answer] = net.answers
    involved = {net.root} | {edge.origin for edge in reachable}
    assert answer.error is None and answer.workers == involved
    for worker, part in net.parts.items():
        assert part._edges == {edge for edge in reachable if net.holders[edge] == worker}


@given(message_graphs(), st.data())
def test_a_loss_reaches_the_root_whenever_it_happens(graph, data):
    net = Net(graph)
    net.begin()
    has_failed = False
    while net.under_way:
        index = data.draw(st.integers(0, len(net.under_way) - 1))
        fails = isinstance(net.under_way[index][1], SearchRequest) and data.draw(st.booleans())
        net.deliver(index, fails)
        has_failed |= fails
    [answer] = net.answers
    assert answer.error is (ERROR if has_failed else None)


def test_nothing_to_ask():
    me = WorkerInfo("me", 0)
    assert Discovery(me).requested("user", []) == [SearchAnswer("user", frozenset([me]))]


def test_the_first_asker_is_answered_last_and_the_others_at_once():
    me, first, second = (
        WorkerInfo(name, number) for number, name in enumerate(("me", "first", "second"))
    )
    part = Discovery(me)
    assert part.requested(first, [Edge(second, 1, 0)]) == [
        SearchRequest(second, (Edge(second, 1, 0),))
    ]
    assert part.requested(second, [Edge(second, 1, 0)]) == [SearchAnswer(second, frozenset([me]))]
    assert part.answered([second]) == [SearchAnswer(first, frozenset([me, second]))]


def test_after_a_failure_everyone_hears_of_it():
    me = WorkerInfo("me", 0)
    other = WorkerInfo("other", 1)
    part = Discovery(me)
    part.requested("first", [Edge(other, 1, 0)])
    assert [each.error for each in part.failed(ERROR)] == [ERROR]
    assert [each.error for each in part.requested("second", [])] == [ERROR]
