"""Rounds in which the server adds updates encrypted by TenSEAL (CKKS, Cheon et al. 2017)."""

import math
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_privacy.checks import whole
from fl_privacy.checks.packages import lacks
from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation.client import Client
from fl_privacy.federation.replies import Failure, attempt, fault, unrounded
from fl_privacy.federation.rounds import Round, RoundReport, one_by_one, personalize, unobserved, with_personalized
from fl_privacy.federation.server import Server
from fl_privacy.federation.training import LocalResult
from fl_privacy.progress import counted
from fl_privacy.types import Tensors, Upload

DEGREE, MODULUS_BITS, SCALE_BITS = 8192, (60, 40, 60), 40
"""Ring dimension and coefficient modulus for 128-bit security; a ciphertext has half as many slots."""


def _tenseal() -> Any:
    try:
        import tenseal  # noqa: PLC0415
    except ImportError as error:
        raise lacks("tenseal", "secure_aggregation=ckks") from error
    return tenseal


class Adder:
    """Server's side of CKKS, which adds ciphertexts without the secret key."""

    def __init__(self, context: bytes) -> None:
        self._tenseal = _tenseal()
        self.context = self._tenseal.context_from(context)
        self.received = 0

    def add(self, uploads: Iterable[Sequence[bytes]]) -> list[bytes]:
        totals: list[Any] = []
        for upload in uploads:
            self.received += sum(map(len, upload))
            vectors = [self._tenseal.ckks_vector_from(self.context, c) for c in upload]
            totals = [t + v for t, v in zip(totals, vectors, strict=True)] if totals else vectors
        return [bytes(total.serialize()) for total in totals]


class KeyHolder:
    """Clients' side of CKKS, with a secret key that all clients share and the server does not have."""

    def __init__(self) -> None:
        self._tenseal = _tenseal()
        kind = self._tenseal.SCHEME_TYPE.CKKS
        self._context = self._tenseal.context(kind, DEGREE, coeff_mod_bit_sizes=list(MODULUS_BITS))
        self._context.global_scale = 2**SCALE_BITS

    def public_context(self) -> bytes:
        return bytes(self._context.serialize(save_secret_key=False, save_galois_keys=False, save_relin_keys=False))

    def encrypt(self, slots: Tensor) -> list[bytes]:
        pieces = slots.split(DEGREE // 2)
        return [bytes(self._tenseal.ckks_vector(self._context, p.tolist()).serialize()) for p in pieces]

    def decrypt(self, ciphertexts: Sequence[bytes]) -> Tensor:
        vectors = (self._tenseal.ckks_vector_from(self._context, c) for c in ciphertexts)
        return torch.cat([torch.tensor(v.decrypt(), dtype=torch.float64) for v in vectors])


SLOT_BITS = 40  # bits of the largest whole number that is exact at this CKKS precision


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packing of several quantized values into each slot of a ciphertext, like BatchCrypt (Zhang et al. 2020).

    Values in [-1, 1] are rounded to ``2^bits - 1`` levels including zero. Each has room for the carries of ``summands``
    additions.
    """

    bits: int = 16
    summands: int = 10  # largest number of packed updates that are added

    def __post_init__(self) -> None:
        example = f"more do not fit for {self.summands} clients, try 16"
        whole("secure_aggregation.bits", self.bits, at_least=2, at_most=SLOT_BITS - self._room, example=example)

    @property
    def _room(self) -> int:
        return math.ceil(math.log2(max(1, self.summands)))

    @property
    def width(self) -> int:
        return self.bits + self._room

    @property
    def per_slot(self) -> int:
        return SLOT_BITS // self.width

    @property
    def step(self) -> float:
        return 1 / self._most

    @property
    def _most(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def pack(self, values: Tensor) -> Tensor:
        """Pack values (N,) in [-1, 1] into (ceil(N / per_slot),) whole numbers as float64."""
        levels = (values.double().clamp(-1, 1) * self._most).round().long() + self._most
        fields = torch.cat([levels, levels.new_zeros(-len(levels) % self.per_slot)]).view(-1, self.per_slot)
        return (fields << torch.arange(self.per_slot) * self.width).sum(1).double()

    def unpack(self, slots: Tensor, count: int, *, summands: int) -> Tensor:
        """Return the sum (count,) of ``summands`` updates' values, given the sum ``slots`` of their packed values."""
        fields = (slots.round().long()[:, None] >> (torch.arange(self.per_slot) * self.width)) & (2**self.width - 1)
        return (fields.flatten()[:count] - summands * self._most).double() * self.step


def encrypted_rounds(
    server: Server, clients: Mapping[int, Client], *, rounds: int, bits: int = 16
) -> Generator[Round, None, dict[int, ClientState]]:
    """Train ``server.state`` under CKKS encryption, yielding each round; return each client's private state.

    The server adds updates that it can't decrypt; the clients share the secret key. Each tensor is divided by the
    largest absolute value over all clients, and encrypted with ``bits`` bits. Largest values and the clients' shares of
    the examples travel in the clear. ``UserError`` if TenSEAL is missing, a setting is out of range, or all clients
    failed.
    """
    keys = KeyHolder()
    adder = Adder(keys.public_context())
    states = {client: ClientState() for client in clients}
    work = partial(_round, server, clients, states, keys, adder, bits=bits)
    yield from one_by_one(rounds, lambda number: unobserved(partial(work, round=number)))
    return states


def _round(
    server: Server,
    clients: Mapping[int, Client],
    states: dict[int, ClientState],
    keys: KeyHolder,
    adder: Adder,
    *,
    bits: int,
    round: int,
) -> RoundReport:
    started = time.perf_counter()
    asked = server.select(round)
    results: dict[int, LocalResult | Failure] = {}
    for client in counted("client", asked):
        state = ClientState(dict(states[client].tensors))
        work = partial(clients[client].update, server.sent_to(client, round), state, round=round)
        results[client] = result = attempt(work)
        if isinstance(result, LocalResult):
            states[client] = state
    sound, excluded = _usable(server, results)
    packing = Packing(bits=bits, summands=len(sound))
    began, before = time.perf_counter(), adder.received
    uploads = [r.upload for r in sound.values()]
    total = sum(u.num_examples for u in uploads)
    # the largest absolute share (N,) that any client has in each element's tensor; 1 where all are zero
    sizes = torch.tensor([t.numel() for t in _all(uploads[0])])
    nothing = torch.zeros(()).double()
    most = [torch.stack([t.double().abs().amax() if t.numel() else nothing for t in _all(u)]) for u in uploads]
    peaks = torch.stack([peak * (u.num_examples / total) for peak, u in zip(most, uploads, strict=True)]).amax(0)
    largest = torch.where(peaks > 0, peaks, 1.0).repeat_interleave(sizes)
    shares = (u.num_examples / total * torch.cat([t.flatten().double() for t in _all(u)]) / largest for u in uploads)
    summed = keys.decrypt(adder.add(keys.encrypt(packing.pack(share)) for share in shares))
    mean = largest * packing.unpack(summed, len(largest), summands=len(sound))
    crypto = time.perf_counter() - began
    server.receive({min(sound): _shaped(mean, uploads[0], total)})
    report = RoundReport(
        round=round,
        clients=tuple(sound),
        excluded=excluded,
        train_loss=sum(r.train_loss for r in sound.values()) / len(sound),
        seconds=time.perf_counter() - started,
        defense_seconds=crypto + sum(r.defense_seconds for r in sound.values()),
        upload_bytes=adder.received - before,
    )
    return with_personalized(report, personalize(server, clients, states, round)) if server.personal else report


def _usable(
    server: Server, results: Mapping[int, LocalResult | Failure]
) -> tuple[dict[int, LocalResult], dict[int, str]]:
    uploads = {c: r if isinstance(r, Failure) else r.upload for c, r in results.items()}
    faults = {c: u.reason if isinstance(u, Failure) else fault(u, server.state) for c, u in uploads.items()}
    excluded = {c: reason for c, reason in faults.items() if reason}
    sound = {c: u for c, u in uploads.items() if isinstance(u, Upload) and c not in excluded}
    layouts = {c: (tuple(u.tensors), tuple(u.buffers)) for c, u in sound.items()}
    if not layouts:
        raise UserError("At least one usable update is expected in a round, but all clients failed; fix them.")
    ((usual, _),) = Counter(layouts.values()).most_common(1)
    excluded |= {c: "its update has other tensors than most" for c, own in layouts.items() if own != usual}
    return {c: r for c, r in results.items() if isinstance(r, LocalResult) and c not in excluded}, excluded


def _all(upload: Upload) -> Sequence[Tensor]:
    return [*upload.tensors.values(), *upload.buffers.values()]


def _shaped(values: Tensor, like: Upload, num_examples: int) -> Upload:
    pieces = iter(values.split([t.numel() for t in _all(like)]))

    def shaped(tensors: Tensors) -> dict[str, Tensor]:
        found = {name: next(pieces).view_as(t) for name, t in tensors.items()}
        return {n: (v if tensors[n].is_floating_point() else v.round()).to(tensors[n].dtype) for n, v in found.items()}

    return Upload(tensors=shaped(like.tensors), buffers=unrounded(shaped(like.buffers)), num_examples=num_examples)
