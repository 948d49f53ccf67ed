"""What a deployed client draws is known to it alone: a server with all that it knows can't repeat it."""

import base64
import logging
import os
import pickle
import shlex
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig as RunConfig
from flwr.client import NumPyClient
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fl_privacy.cli.flower_app import client_app, make_client
from fl_privacy.defenses import ClientState, Defense, dp_noise, instahide, spn
from fl_privacy.defenses._dp_noise import Distribution, sample_noise
from fl_privacy.errors import UserError
from fl_privacy.federation import Client, public_state
from fl_privacy.flower import (
    ATSClient,
    DPClient,
    LocalGrid,
    PassportClient,
    PrivacyClient,
    SplitFedClient,
    SPNClient,
    defend,
    local_dp_mod,
    node_secret,
)
from fl_privacy.flower._node_memory import FILE, kept_secret
from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.flower.records import CONFIG, ROUND, read_result, state_records
from fl_privacy.rng import Secret, SecretGenerator, derive_generator, derive_seed
from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import compose_run
from fl_privacy.types import LocalPlan, ModelState, Tensors, VictimId
from tests.federation import harness

CLIENT, SCALE = 3, 0.1
OVERRIDES = (
    "model=lenet federation=fedsgd federation.clients=50 federation.rounds=2 federation.plan.batch_size=200"
    f" defense=dp_noise defense.scale={SCALE} attack=none baseline=false seed=17"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FL_PRIVACY_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FL_PRIVACY_SIMULATION", raising=False)
    return tmp_path / "state"


def context(run: int = 1, node: int = 5, state: RecordDict | None = None, **node_config: str) -> Context:
    return Context(
        run_id=run,
        node_id=node,
        node_config=RunConfig({"partition-id": CLIENT, "num-partitions": 50, **node_config}),
        state=RecordDict() if state is None else state,
        run_config=RunConfig({"overrides": OVERRIDES}),
    )


class Server:
    """An honest-but-curious one: it has the run's configuration, the code, the data, and every message."""

    def __init__(self) -> None:
        self.config = compose_run(shlex.split(OVERRIDES))
        self.grid = LocalGrid([CLIENT], client_app)
        self.grid.contexts = {FIRST_NODE + CLIENT: context(node=FIRST_NODE + CLIENT)}
        self.wire = bytearray()
        simulated = clients_of(self.config)[CLIENT]
        self.sent = public_state(simulated.model, simulated.defense)

    def ask(self, round: int = 1) -> Tensors:
        content = RecordDict({**state_records(self.sent), CONFIG: ConfigRecord({ROUND: round})})
        (reply,) = self.grid.send_and_receive([Message(content, FIRST_NODE + CLIENT, "train")])
        for part in get_all_nested_objects(reply).values():
            self.wire += part.deflate()
        return read_result(reply.content, self.sent).upload.tensors

    def clean(self) -> Tensors:
        """Compute the gradient without noise, which the server is after."""
        mine = clients_of(self.config)[CLIENT]
        return replace(mine, defense=Defense()).update(self.sent, ClientState(), round=1).upload.tensors

    def error_after_removal(self, upload: Tensors) -> float:
        """Root mean square of what is left when the noise is computed and subtracted, by its best guess."""
        mine, clean = clients_of(self.config)[CLIENT], self.clean()
        elsewhere = kept_secret(Path(os.environ["FL_PRIVACY_STATE"]).with_name("server") / FILE)
        guesses: list[int | Secret] = [17, 0, 1, 2, CLIENT, FIRST_NODE + CLIENT, derive_seed(17, "client", CLIENT)]
        guesses += [elsewhere, elsewhere.derive("run", 1, "partition", CLIENT), Secret(bytes(32))]
        left = []
        for guess in guesses:
            noised = replace(mine, seed=guess).update(self.sent, ClientState(), round=1).upload.tensors
            left.append(rms({n: upload[n] - (noised[n] - clean[n]) - clean[n] for n in upload}))
        return min(left)


def rms(tensors: Tensors) -> float:
    return float(torch.cat([t.flatten().double() for t in tensors.values()]).square().mean().sqrt())


def test_a_server_removes_the_noise_of_a_simulation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal works where it can: what the next test shows is not its weakness."""
    monkeypatch.setenv("FL_PRIVACY_SIMULATION", "1")
    server = Server()

    upload = server.ask()

    assert rms({n: upload[n] - t for n, t in server.clean().items()}) == pytest.approx(SCALE, rel=0.05)
    assert server.error_after_removal(upload) < 1e-6
    assert not folder.exists()


def test_a_server_removes_no_noise_of_a_deployed_client(folder: Path) -> None:
    server = Server()

    upload = server.ask()

    assert rms({n: upload[n] - t for n, t in server.clean().items()}) == pytest.approx(SCALE, rel=0.05)
    assert server.error_after_removal(upload) > SCALE


def test_a_round_answered_twice_shows_no_difference_without_noise(folder: Path) -> None:
    """As by a node that has lost what it remembers: others refuse."""
    server = Server()

    first = server.ask()
    for memory in folder.glob("run-*/*"):
        memory.unlink()
    server.grid.contexts = {FIRST_NODE + CLIENT: context(node=FIRST_NODE + CLIENT)}
    second = server.ask()

    assert rms({n: first[n] - second[n] for n in first}) == pytest.approx(2**0.5 * SCALE, rel=0.05)


def test_the_secret_is_in_no_message_log_or_memory(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = Server()

    server.ask()

    key = (folder / FILE).read_bytes()
    kept = b"".join(
        p.deflate() for p in get_all_nested_objects(server.grid.contexts[FIRST_NODE + CLIENT].state).values()
    )
    client = make_client(context())
    seen = bytes(server.wire) + kept + caplog.text.encode() + repr(client.wrapped).encode()
    for spelled in (key, key.hex().encode(), base64.b64encode(key)):
        assert spelled not in seen
    assert next(iter(server.sent.parameters)).encode() in server.wire, "the search finds what is sent"
    assert "Secret(...)" in repr(client.wrapped)
    with pytest.raises(TypeError, match="expected to stay in its process"):
        pickle.dumps(client.wrapped.seed)


def test_the_file_is_its_owner_s_alone_and_made_once(folder: Path) -> None:
    before = node_secret(context()).bytes_of("", 8)
    key = (folder / FILE).read_bytes()

    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert len(key) == 32
    assert node_secret(context()).bytes_of("", 8) == before
    assert (folder / FILE).read_bytes() == key


def test_the_node_config_names_another_folder(folder: Path, tmp_path: Path) -> None:
    node_secret(context(**{"fl-privacy-state": str(tmp_path / "other")}))

    assert (tmp_path / "other" / FILE).exists()
    assert not folder.exists()


def test_processes_that_start_together_share_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        drawn = list(pool.map(lambda _: kept_secret(tmp_path / "a" / "b" / FILE).bytes_of("", 16), range(64)))

    assert len(set(drawn)) == 1


def of_partition(number: int | None, node: int = 5, run: int = 1) -> Context:
    """Make a node's context; ``None`` is a node of an app without partitions."""
    made = context(run, node)
    if number is None:
        del made.node_config["partition-id"]
    else:
        made.node_config["partition-id"] = number
    return made


def test_runs_partitions_and_nodes_without_any_draw_apart(folder: Path) -> None:
    contexts = [of_partition(p, n, r) for r in (1, 2) for p, n in ((3, 5), (4, 5), (None, 5), (None, 6))]

    assert len({node_secret(c).bytes_of("", 8) for c in contexts}) == 8


def test_a_node_that_restarts_under_another_id_draws_as_before(folder: Path) -> None:
    one, other = (node_secret(of_partition(3, node)).bytes_of("", 8) for node in (5, 6))

    assert one == other


def open_to_all(path: Path) -> None:
    path.chmod(0o644)


def cut(path: Path) -> None:
    path.write_bytes(b"short")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(open_to_all, "others own or read it"), (cut, "hold a secret of 32 bytes"), (a_folder, "Is a directory")],
)
def test_a_file_that_is_no_secret_is_refused(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    node_secret(context())
    spoil(folder / FILE)

    with pytest.raises(UserError, match=said):
        node_secret(context())


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UserError, match="set FL_PRIVACY_STATE to a folder"):
        kept_secret(tmp_path / "file" / FILE)


def simulated(**settings: Any) -> Client:
    return replace(harness.clients(harness.FEDAVG, Defense())[0], **settings)


def unseeded() -> Client:
    made = simulated()
    return Client(
        id=made.id, examples=made.examples, indices=made.indices, model=made.model, plan=made.plan, defense=made.defense
    )


POLICY = {"policies": "3-43-15"}
CLIENTS: list[tuple[type[PrivacyClient], dict[str, Any]]] = [
    (DPClient, {"scale": 0.1}),
    (ATSClient, POLICY),
    (SPNClient, {}),
    (SplitFedClient, {}),
    (PassportClient, {}),
]


def fitted(client: PrivacyClient) -> np.ndarray:
    arrays, _, _ = client.fit(client.get_parameters({}), {"server-round": 1})
    return np.concatenate([a.ravel().astype(float) for a in arrays])


@pytest.mark.parametrize(("kind", "settings"), CLIENTS, ids=lambda c: getattr(c, "__name__", ""))
def test_a_client_without_a_seed_draws_a_secret_one(kind: type[PrivacyClient], settings: dict[str, Any]) -> None:
    assert isinstance(kind(unseeded(), **settings).wrapped.seed, Secret)
    assert not np.array_equal(fitted(kind(unseeded(), **settings)), fitted(kind(unseeded(), **settings)))
    seeded = simulated(seed=4)
    assert np.array_equal(fitted(kind(seeded, **settings)), fitted(kind(seeded, **settings)))


def test_a_private_head_is_the_same_after_its_node_has_lost_its_memory(folder: Path) -> None:
    def head(partition: int = 3) -> torch.Tensor:
        subject = simulated(seed=node_secret(of_partition(partition)), defense=spn())
        private: ModelState = subject.private_part(ModelState.of(harness.small_net()), ClientState())[1]
        return private.buffers["out.spn.codes"]

    assert torch.equal(head(), head())
    assert not torch.equal(head(), head(partition=4))


def test_what_a_deployed_client_trained_on_is_not_repeated() -> None:
    with pytest.raises(UserError, match="expected to be simulated"):
        assert harness.replay(unseeded(), VictimId(1, 0)).examples


def test_the_victims_of_an_audited_client_are_those_that_the_auditor_knows() -> None:
    guessed = simulated(seed=17)
    deployed = simulated(seed=Secret.draw(), audit_seed=17)

    assert torch.equal(guessed.victim_batch(1, 2).inputs, deployed.victim_batch(1, 2).inputs)


def follows_from_32_bits(rng: torch.Generator) -> bool:
    """Whether the Mersenne Twister's state is one that ``manual_seed`` makes, each word from the one before."""
    words = rng.get_state()[24 : 24 + 624 * 8].numpy().view("<u8").astype(object)
    made = [1812433253 * (int(w) ^ (int(w) >> 30)) + i & 0xFFFFFFFF for i, w in enumerate(words[:-1], start=1)]
    return made == [int(w) for w in words[1:]]


def test_no_stream_of_a_secret_starts_from_the_32_bits_that_pytorch_takes() -> None:
    small, large = (torch.Generator().manual_seed(s) for s in (5, 5 + (77 << 32)))
    assert torch.equal(torch.rand(9, generator=small), torch.rand(9, generator=large)), "PyTorch takes 32 bits"

    assert follows_from_32_bits(derive_generator(7, "client", 0))
    assert not follows_from_32_bits(derive_generator(Secret.draw(), "client", 0))


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_secret_noise_is_no_output_of_the_twister(distribution: Distribution) -> None:
    """Noise on zeros is read by the server: it must not tell how the stream goes on."""
    rng = SecretGenerator(Secret.draw())
    before = rng.get_state()

    noise = sample_noise(torch.zeros(100_000), distribution, 2.0, rng)

    assert torch.equal(rng.get_state(), before)
    assert not torch.equal(noise, sample_noise(torch.zeros(100_000), distribution, 2.0, rng))
    assert torch.isfinite(noise).all()
    assert float(noise.double().std()) == pytest.approx(2 * (2**0.5 if distribution == "laplace" else 1), rel=0.02)


def test_secret_noise_has_its_distribution() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = SecretGenerator(Secret(b"k" * 32))

    for distribution, known in (("gaussian", "norm"), ("laplace", "laplace")):
        noise = sample_noise(torch.zeros(50_000).double(), distribution, 1.0, rng)  # type: ignore[arg-type]
        assert stats.kstest(noise.numpy(), known).pvalue > 1e-3


@pytest.mark.parametrize(
    "defense", [dp_noise(scale=0.1), local_dp_mod(clip_norm=1.0), instahide()], ids=lambda d: d.name
)
def test_defenses_draw_from_secrets_too(defense: Defense) -> None:
    sent, plan = ModelState.of(harness.small_net()), LocalPlan(shares="gradient", batch_size=12)
    subject = replace(unseeded(), defense=defense, plan=plan)

    one, two = (subject.update(sent, ClientState(), round=1).upload.tensors for _ in range(2))

    assert all(torch.isfinite(t).all() for t in one.values())
    assert not torch.equal(one["out.weight"], two["out.weight"])


def test_a_defense_around_a_foreign_client_draws_256_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.Generator] = []

    def spy(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        used.append(rng)
        return tensors

    class Foreign(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [a + 1 for a in parameters], 3, {}

    defend(Foreign(), Defense(upload=(spy,))).fit([np.zeros(3, np.float32)], {"server-round": 1})

    assert not follows_from_32_bits(used[0])


def test_secrets_are_derived_without_collisions_between_names() -> None:
    secret = Secret.draw()

    assert secret.derive("a", "b/c").bytes_of("", 8) != secret.derive("a/b", "c").bytes_of("", 8)
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(b"short")
