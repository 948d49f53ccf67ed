"""Graphs in PyTorch Geometric's form, and the labels of vertical learning: what audits find."""

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.attacks.attack import within
from fl_privacy.attacks.exact.certificate import nonnegative_least_squares
from fl_privacy.auditing import scenarios
from fl_privacy.auditing.instrument.program import ReplayModel, connections_of, graph_entries, kinds_in, tensors_in
from fl_privacy.auditing.instrument.watch import OnlyExamples, TrainingWatch
from fl_privacy.auditing.scenario_graphs import (
    Balls,
    Graph,
    UnknownEdges,
    graph_in,
    graph_of,
    joined,
    linked,
    nodes_of,
    score_graphs,
    score_nodes,
)
from fl_privacy.auditing.scenario_problem import StepProblem, gradient_plan, read_problem, reason_of
from fl_privacy.auditing.vertical import SplitTraining, clusters_of, labels_right
from fl_privacy.federation.replies import Failure
from fl_privacy.types import Batch, Observation, Reconstruction, VictimId
from tests.flower.untouched_apps import BEGUN, HEAD, audited, rung

LIBRARY = '''
class Graph:
    """A graph in the form of PyTorch Geometric's Data."""
    def __init__(self, **entries):
        self.__dict__.update(entries)
    def to_dict(self):
        return dict(self.__dict__)
    def __setitem__(self, key, value):
        setattr(self, key, value)

class Graphs(Graph):
    @classmethod
    def from_data_list(cls, graphs):
        starts = np.cumsum([0, *(len(each.x) for each in graphs)]).tolist()
        edges = torch.cat([each.edge_index + start for each, start in zip(graphs, starts)], 1)
        batch = torch.arange(len(graphs)).repeat_interleave(torch.tensor([len(each.x) for each in graphs]))
        x, y = (torch.cat([getattr(each, name) for each in graphs]) for name in "xy")
        return cls(x=x, edge_index=edges, y=y, batch=batch, graphs=graphs)
    @property
    def num_graphs(self):
        return len(self.graphs)
    def to_data_list(self):
        return self.graphs

def molecule(g):
    ends = torch.stack([torch.tensor([int(torch.randint(k, (1,), generator=g)), k]) for k in range(1, 9)]).T
    kinds = torch.randint(0, 5, (9,), generator=g)
    edges, y = torch.cat([ends, ends.flip(0)], 1), (kinds == 0).sum()[None] % 2
    return Graph(x=F.one_hot(kinds, 5).float(), edge_index=edges, y=y)

def mixed(x, edges):
    return x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 24), nn.Linear(24, 24), nn.Linear(24, 2)
    def forward(self, data):
        x = torch.tanh(mixed(self.first(data.x), data.edge_index))
        x = torch.tanh(mixed(self.second(x), data.edge_index))
        return self.last(torch.zeros(data.num_graphs, 24).index_add(0, data.batch, x))

class Whole(nn.Module):
    """As ``Net``, but with means of any number of graphs."""
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 2)
    def forward(self, data):
        x = self.second(self.first(mixed(data.x, data.edge_index)).relu()).relu()
        x = self.third(mixed(x, data.edge_index)).relu()
        sizes = torch.bincount(data.batch)
        return self.last(torch.zeros(len(sizes), 40).index_add(0, data.batch, x) / sizes[:, None])

def load(number):
    g = torch.Generator().manual_seed(number)
    return DataLoader([molecule(g) for _ in range(12)], batch_size=4, collate_fn=Graphs.from_data_list)

def fit(net, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for data in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(data), data.y).backward()
        optimizer.step()
'''

GRAPHS = (
    HEAD
    + LIBRARY
    + BEGUN
    + """    fit(net, load(int(context.node_config["partition-id"])))
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 12})
"""
)
"""A network on molecules of nine atoms of five kinds, in batches of four graphs."""

VERTICAL_CLIENT = (
    HEAD
    + """
def Net():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
def begun(context):
    torch.manual_seed(0)
    net, own = Net(), int(context.node_config["partition-id"])
    if "net" in context.state:
        net.load_state_dict(context.state["net"].to_torch_state_dict())
    return net, torch.rand(120, 3, generator=torch.Generator().manual_seed(own))
@app.query()
def embed(msg, context):
    net, x = begun(context)
    own = int(context.node_config["partition-id"])
    return Message(RecordDict({"a": ArrayRecord({"e": Array(net(x).detach().numpy())}), "p": ConfigRecord({"p": own})}),
                   reply_to=msg)
@app.train()
def learn(msg, context):
    net, x = begun(context)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).backward(torch.from_numpy(msg.content["g"]["g"].numpy().copy()))
    optimizer.step()
    context.state["net"] = ArrayRecord(net.state_dict())
    return Message(RecordDict(), reply_to=msg)
"""
)

VERTICAL_SERVER = """
import torch
from torch import nn
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    torch.manual_seed(1)
    head = nn.Linear(8, 1)
    y = torch.randint(0, 2, (120, 1), generator=torch.Generator().manual_seed(5)).float()
    nodes = list(grid.get_node_ids())
    for _ in range(3):
        replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes])
        place = dict((reply.metadata.src_node_id, reply.content["p"]["p"]) for reply in replies)
        held = dict((place[r.metadata.src_node_id], torch.tensor(r.content["a"]["e"].numpy())) for r in replies)
        both = torch.cat([held[0], held[1]], 1).requires_grad_()
        nn.BCEWithLogitsLoss()(head(both), y).backward()
        parts = both.grad.split(4, 1)
        gradients = dict((node, ArrayRecord(dict(g=Array(parts[k].numpy())))) for node, k in place.items())
        sent = dict((node, RecordDict(dict(g=record))) for node, record in gradients.items())
        grid.send_and_receive([Message(content, node, "train") for node, content in sent.items()])
"""
"""A server that holds the labels of 120 examples, and sends gradients of embeddings to its clients."""


def _library(
    kinds: str = "randint(0, 5,", third: str = "self.third(mixed(x, data.edge_index)).relu()"
) -> dict[str, object]:
    made: dict[str, object] = {}
    changed = LIBRARY.replace("randint(0, 5,", kinds).replace("self.third(mixed(x, data.edge_index)).relu()", third)
    exec(HEAD + changed, made)
    return made


def _observed(
    made: dict[str, object], client: int, first: int, number: int = 1, kind: str = "Net"
) -> tuple[StepProblem, Observation]:
    torch.manual_seed(0)
    net, loader = made[kind](), made["load"](client)  # type: ignore[operator]
    with TrainingWatch(program=True, only=OnlyExamples(first=first, number=number)).looking() as seen:
        made["fit"](net, loader)  # type: ignore[operator]
    assert seen.loaded == number and [len(each) for each in seen.labels] == [number]
    problem = read_problem(seen, [torch.cat([graph.x for graph in loader.dataset])])
    return problem, problem.observed(first, seen.gradients, gradient_plan(seen))


@pytest.mark.long
def test_the_nodes_of_a_graph_are_found_from_one_gradient() -> None:
    """Each graph is reconstructed as a whole, but for nodes that its connections do not tell apart."""
    made = _library()
    pairs = [_observed(made, client, 0) for client in range(3)]
    assert all(len(problem.truth) == 9 and problem.model.kinds == (5,) for problem, _ in pairs)
    assert any("given each graph's connections, labels" in note for note in pairs[0][0].notes)
    guesses = [nodes_of(observation, (5,)) for _, observation in pairs]
    assert all(guess is not None and guess.loss < 1e-6 for guess in guesses)
    loaded = [torch.cat([graph.x for graph in made["load"](client).dataset]) for client in range(3)]  # type: ignore[operator]
    found = score_nodes([problem for problem, _ in pairs], [guess for guess in guesses if guess], loaded)
    assert found.counts is not None and found.counts.exact == 27 and found.above_chance
    blurred = [replace(g, batch=replace(g.batch, inputs=0.6 * g.batch.inputs + 0.2)) for g in guesses if g and g.batch]
    rounded = score_nodes([problem for problem, _ in pairs], blurred, loaded)
    assert rounded.counts is not None and rounded.counts.exact == 27
    # guesses at another graph are right in no more nodes than guessing
    turned = [
        Reconstruction(id=a.id, batch=b.batch)
        for a, b in zip(guesses, guesses[1:] + guesses[:1], strict=True)
        if a and b
    ]
    wrong = score_nodes([problem for problem, _ in pairs], turned, loaded)
    assert wrong.counts is not None and wrong.counts.exact < 18 and not wrong.above_chance


@pytest.mark.long
def test_nodes_and_edges_are_found_from_one_gradient() -> None:
    made = _library()
    pairs = [_observed(made, client, 0, kind="Whole") for client in range(3)]
    problems, found = [problem for problem, _ in pairs], [graph_of(observation, (5,)) for _, observation in pairs]
    answer = score_graphs(problems, found)
    assert answer.counts is not None and answer.counts.exact == 27 and answer.above_chance
    assert "24 of 24 edges are right" in answer.notes[1] and "3 of 3 graphs" in answer.notes[1]
    turned = score_graphs(problems, found[1:] + found[:1])
    assert turned.counts is not None and turned.counts.exact < 9 and not turned.above_chance
    assert not score_graphs(problems[:1], found[:1]).above_chance, "one graph has no control"


@pytest.mark.long
def test_edges_are_not_guessed_from_noise_or_if_the_network_takes_no_other_graph() -> None:
    made = _library()
    assert isinstance(graph_of(_observed(made, 0, 0)[1], (5,)), Failure)
    assert isinstance(graph_of(_observed(made, 0, 0, 2, kind="Whole")[1], (5,)), Failure), "two graphs"
    _, seen = _observed(made, 0, 0, kind="Whole")
    noisy = {name: value + 0.01 * torch.randn(value.shape) for name, value in seen.upload.tensors.items()}
    failed = graph_of(replace(seen, upload=replace(seen.upload, tensors=noisy)), (5,))
    assert isinstance(failed, Failure) and "gradient" in reason_of(failed)
    with within(0.0):
        failed = graph_of(seen, (5,))
    assert isinstance(failed, Failure) and reason_of(failed) == "the time limit ended the search"


@pytest.mark.long
def test_the_true_graph_is_not_used_but_for_the_gradient() -> None:
    """Other nodes and edges in the recorded program change nothing."""
    made = _library()
    problem, seen = _observed(made, 1, 0, kind="Whole")
    other, _ = _observed(made, 2, 0, kind="Whole")
    known: Any = seen.model.program.constants  # type: ignore[union-attr]
    model: Any = problem.model
    program = replace(
        model.program, constants={**known, **dict(zip(_places(problem), graph_in(other.model), strict=True))}
    )
    guesses = [graph_of(seen, (5,))]
    model.program = program
    guesses.append(graph_of(seen, (5,)))
    assert not any(isinstance(guess, Failure) for guess in guesses)
    assert all(torch.equal(a, b) for a, b in zip(*guesses, strict=True))


def _places(problem: StepProblem) -> tuple[int, int]:
    return problem.model.variables[0], connections_of(problem.model)


def test_edges_join_what_neighborhoods_ask_for() -> None:
    assert joined([0, 1, 0], [[1], [0, 0], [1]]) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert joined([0, 0], [[], []]) == []
    assert joined([0, 1], [[1], []]) is None
    apart = joined([0] * 3 + [1] * 3, [[0, 0]] * 3 + [[1, 1]] * 3)
    assert apart is not None and len(apart) == 12, "two rings"


def _drawn_graphs(number: int, nodes: int = 9) -> list[Graph]:
    graphs, g = list[Graph](), torch.Generator().manual_seed(0)
    for _ in range(number):
        ends = torch.stack(
            [torch.arange(1, nodes), (torch.rand(nodes - 1, generator=g) * torch.arange(1, nodes)).long()]
        )
        kinds = torch.eye(5)[torch.randint(5, (nodes,), generator=g)]
        graphs.append((kinds, torch.cat([ends, ends.flip(0)], 1)))
    return graphs


def _problems(graphs: list[Graph]) -> list[Any]:
    """Make problems whose models hold ``graphs``."""
    calls = [SimpleNamespace(part=0, taken=[0, 1])]
    programs = [SimpleNamespace(constants=dict(enumerate(graph)), calls=calls) for graph in graphs]
    models = [SimpleNamespace(variables=(0,), program=program, kinds=(5,), fixed_inputs=()) for program in programs]
    return [SimpleNamespace(model=model, truth=model.program.constants[0]) for model in models]


LATE = Failure("NotAttackedError: the time limit ended the search")


def test_uploads_without_a_guess_count_as_missed() -> None:
    graphs = _drawn_graphs(8)
    answer = score_graphs(_problems(graphs), [graphs[0], *[LATE] * 7])
    assert answer.counts is not None and answer.above_chance
    assert (answer.counts.exact, answer.counts.judged, answer.counts.groups) == (9, 72, 8)
    assert answer.notes[2] == "Of 7 of 8 graphs, edges are not reconstructed: the time limit ended the search."


def test_large_graphs_and_missing_guesses_are_not_compared() -> None:
    graphs, begun = [*_drawn_graphs(3), *_drawn_graphs(5, nodes=1000)], time.process_time()
    none = score_graphs(_problems(graphs), [LATE] * 8)
    assert none.counts is not None and none.counts.failures == 5027 and not none.above_chance
    some = score_graphs(_problems(graphs), [graphs[0], LATE, *graphs[2:]])
    assert some.counts is not None and (some.counts.exact, some.counts.judged) == (18, 5027)
    assert time.process_time() - begun < 10


def test_nodes_of_all_uploads_count_more_than_edges_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = _drawn_graphs(8)
    edges = iter([graphs[0], *[LATE] * 7] * 2)
    for name, made in {"words_of": None, "words_of_uploads": None, "_notes": ("A note.",)}.items():
        monkeypatch.setattr(scenarios, name, lambda *_, made=made, **__: made)
    monkeypatch.setattr(scenarios, "read_problem", lambda problem, _: problem)
    monkeypatch.setattr(scenarios, "graph_of", lambda *_: next(edges))
    attacked, found = scenarios.Scenarios([], lambda *_, **__: []), list[Any]()
    for problem in _problems(graphs):
        observed: Any = SimpleNamespace(model=ReplayModel.__new__(ReplayModel))
        observed.model.__dict__.update(vars(problem.model))
        problem.observed_reply, problem.whole = lambda *_, observed=observed, **__: observed, True
        found.append((SimpleNamespace(inputs=lambda: [graphs[0][0]]), SimpleNamespace(watched=problem)))
    batches = [Batch(nodes, torch.ones(9, 1)) for nodes, _ in graphs]
    guesses = [Reconstruction(id=VictimId(0, k), batch=batch) for k, batch in enumerate(batches)]
    monkeypatch.setattr(attacked, "_reconstructions", lambda _: (guesses, ("Hurried.",)))
    answer = attacked._attacked(found, uploaded=False)
    assert answer.kind == "node" and answer.counts is not None and answer.counts.exact == 72
    assert answer.notes[0] == "A note." and answer.notes[-1] == "Hurried."
    assert answer.notes[1].startswith("Without given edges, 8 of 64 edges are right")
    guesses[:] = [replace(guess, batch=None, failure="none") for guess in guesses]
    answer = attacked._attacked(found, uploaded=False)
    assert answer.kind == "graph" and answer.counts is not None and answer.counts.exact == 9


def test_one_message_step_on_one_kind_of_node_is_solved() -> None:
    made = _library("randint(0, 1,", "self.third(x).relu()")
    problem, seen = _observed(made, 0, 0, kind="Whole")
    found = graph_of(seen, (5,))
    assert not isinstance(found, Failure), "graphs with equal gradients differ"
    assert sorted(map(len, linked(*found))) == sorted(map(len, linked(*graph_in(problem.model))))


def test_sums_of_many_nodes_are_not_joined() -> None:
    search = UnknownEdges.__new__(UnknownEdges)
    gradient = {"last.weight": torch.tensor([[66.0, 130.0]]), "last.bias": torch.ones(1)}
    search.trial, search.pools = SimpleNamespace(gradient=gradient), [("last", torch.nn.Linear(2, 1))]  # type: ignore[assignment]
    search._inputs = lambda *_: torch.tensor([[1.0, 1.0], [1.0, 2.0]]).double()  # type: ignore[method-assign]
    balls = Balls([0, 0], [(0,), (0, 0)], [0, 0])
    assert not list(search._counts(balls)), "2 nodes at the ends of a path and 64 inside"
    gradient["last.weight"] = torch.tensor([[64.0, 126.0]])
    assert list(search._counts(balls)) == [[2, 62]]


def test_a_search_of_shares_ends_in_time() -> None:
    known = torch.rand(200, 4000, generator=torch.Generator().manual_seed(0)).double()
    shares = torch.zeros(4000).double().index_fill(0, torch.tensor([3, 70]), 0.5)
    assert torch.allclose(nonnegative_least_squares(known, known @ shares), shares, atol=1e-6)
    with within(0.0) as limit:
        assert (nonnegative_least_squares(known, known @ shares) > 0).sum() == 1
    assert limit.cut


def test_a_guess_of_the_most_frequent_kind_is_no_evidence() -> None:
    made = _library()
    problem, observation = _observed(made, 0, 0)
    common = torch.zeros_like(problem.truth)
    common[..., int(problem.truth.sum(0).argmax())] = 1
    guess = nodes_of(observation, (5,))
    assert guess is not None and guess.batch is not None
    usual = replace(guess, batch=replace(guess.batch, inputs=common))
    assert not score_nodes([problem], [usual], [common.flatten(1).repeat(20, 1)]).above_chance


def test_other_numbers_have_no_kinds_and_noise_hides_the_spans() -> None:
    assert kinds_in(torch.eye(4)) == (4,)
    assert kinds_in(torch.tensor([[1.0, 0, 0, 1, 0], [0, 1, 1, 0, 0]])) == (2, 3)
    assert kinds_in(torch.tensor([[1.0, 0, 1], [0, 1, 0]])) == () and kinds_in(torch.rand(5, 4)) == ()
    _, observation = _observed(_library(), 0, 0)
    noise = torch.Generator().manual_seed(0)
    noisy = {n: v + 0.01 * torch.randn(v.shape, generator=noise) for n, v in observation.upload.tensors.items()}
    assert nodes_of(replace(observation, upload=replace(observation.upload, tensors=noisy)), (5,)) is None


def test_a_graph_is_seen_by_its_entries_alone() -> None:
    made = _library()
    graph = made["load"](0).dataset[0]  # type: ignore[operator]
    assert set(graph_entries(graph) or {}) == {"x", "edge_index", "y"} and len(tensors_in(graph)) == 3
    assert graph_entries({"edge_index": graph.edge_index}) is None and graph_entries(torch.ones(2)) is None


@pytest.mark.long
def test_an_app_of_graphs_is_attacked_to_its_page(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_molecules", GRAPHS, rounds=1, victims=4, seconds=60.0, only=("gradient", "one"))
    for name in ("gradient", "one"):
        found = rung(record, name)
        assert found["kind"] == "node" and found["counts"]["exact"] == 36, name
        assert found["control"]["read"] < 24
    assert "The server reconstructed 36 of 36 nodes" in record["headline"]


def test_directions_of_two_classes_form_two_groups() -> None:
    rng = np.random.default_rng(0)
    labels, direction = rng.integers(0, 2, 200), rng.standard_normal(8)
    vectors = (labels - rng.uniform(0.2, 0.8, 200))[:, None] * direction + 0.02 * rng.standard_normal((200, 8))
    assert labels_right(clusters_of(vectors, 2), labels) == 200
    assert labels_right(clusters_of(rng.standard_normal((200, 8)), 2), labels) < 130


def _split(labels: torch.Tensor, vectors: np.ndarray, *, trained: bool = True, client: bool = False) -> SplitTraining:
    """Send ``vectors`` after a loss of ``labels`` by the server, ``trained`` or not, and maybe one by a ``client``."""
    split, outputs = SplitTraining(), torch.full((len(labels),), 0.5, requires_grad=trained)
    with split.looking():
        torch.nn.functional.binary_cross_entropy(input=outputs, target=labels)
        if client:
            with split.looking(client=True):
                torch.nn.functional.cross_entropy(torch.rand(16, 2), torch.zeros(16).long())
    split.note(7, {"g/g": vectors}, {"e/e": _sent_for(vectors)})
    split.note(7, {"g/g": vectors[:30]}, {})  # of no vector an example
    return split


def _sent_for(vectors: np.ndarray) -> np.ndarray:
    """Make what a client sends for as many examples."""
    return np.arange(vectors.size).reshape(vectors.shape) % 7 - 3.0


def test_vectors_that_say_nothing_of_labels_are_not_above_chance() -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 2, 200)).float()
    (found,) = _split(labels, rng.standard_normal((200, 8))).answers()
    assert found.question == "labels" and not found.above_chance


def test_empty_arrays_before_any_loss_are_no_vectors_of_examples() -> None:
    split = SplitTraining()
    split.note(7, {"g/g": np.zeros((0, 3), np.float32)}, {"e/e": np.zeros((0, 3), np.float32)})
    assert not split.received and not split.sent


def test_clients_that_send_nothing_or_have_a_loss_of_any_kind_are_no_vertical_learning() -> None:
    labels = torch.arange(200).remainder(2).float()
    vectors = (labels.numpy() - 0.5)[:, None] * np.ones((200, 8))
    for sent, own_loss in ((False, False), (True, True)):
        split = _split(labels, vectors)
        split.sent = split.sent if sent else {}
        split.note(7, {}, {}, own_loss=own_loss)
        assert not list(split.answers())


def test_labels_are_inferred_only_if_the_server_alone_trains_on_them() -> None:
    """An evaluation by the server, or clients with a loss of their own, are no vertical learning."""
    labels = torch.arange(200).remainder(2).float()
    vectors = (labels.numpy() - 0.5)[:, None] * np.ones((200, 8))
    (found,) = _split(labels, vectors).answers()
    assert found.estimate is not None and found.estimate.value == 1.0 and found.above_chance
    assert not list(_split(labels, vectors, trained=False).answers())
    assert not list(_split(labels, vectors, client=True).answers())


def test_integers_of_two_examples_are_no_connections() -> None:
    pairs = torch.tensor([[0, 1, 1], [1, 0, 1]])
    for rows, number in ((2, -1), (3, 1)):
        program = SimpleNamespace(
            constants={0: torch.rand(rows, 4), 1: pairs}, calls=[SimpleNamespace(part=0, taken=[0, 1])]
        )
        model: Any = SimpleNamespace(variables=(0,), program=program)
        assert connections_of(model) == number


@pytest.mark.long
def test_a_client_of_a_vertical_app_infers_the_server_s_labels(tmp_path: Path) -> None:
    """The sign of a gradient is that of its label; embeddings of drawn labels say nothing."""
    record = audited(tmp_path, "app_vertical", VERTICAL_CLIENT, VERTICAL_SERVER, rounds=3)
    (received,) = (each for each in record["survivors"] if each["name"] == "labels")
    assert received["found"]["value"] == 1.0 and received["control"]["value"] < 0.7
    (note,) = received["notes"]
    assert "Clients can infer 120 of 120 labels from what the server sends" in note
    sent = re.search(r"What clients send, such as embeddings, groups (\d+) of 120", note)
    assert sent is not None and int(sent[1]) < 84
    assert record["tone"] == "leak" and "a client learns which class each example" in record["headline"].lower()


@pytest.mark.long
def test_a_server_that_evaluates_predictions_is_no_vertical_learning(tmp_path: Path) -> None:
    """Clients upload and get a vector for each example; the server only evaluates on the labels."""
    server = VERTICAL_SERVER.replace("head(both), y).backward()", "head(both).detach(), y)")
    server = server.replace("both.grad.split(4, 1)", "((y - 0.5) * torch.ones(1, 8)).split(4, 1)")
    record = audited(tmp_path, "app_predictions", VERTICAL_CLIENT, server, rounds=3)
    assert not [each for each in record["survivors"] if each["name"] == "labels"]
    assert "class" not in record["headline"]


def test_equal_vectors_and_zeros_say_nothing_of_labels() -> None:
    labels = torch.arange(200).remainder(2).float()
    for vectors in (np.zeros((200, 4)), np.ones((200, 4))):
        (found,) = _split(labels, vectors).answers()
        assert not found.above_chance
