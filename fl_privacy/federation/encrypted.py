"""Rounds in which the server adds up encrypted updates."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation.attempt import attempt
from fl_privacy.federation.ckks import Adder, KeyHolder
from fl_privacy.federation.local_update import LocalResult
from fl_privacy.federation.loop import RoundReport, settle, settled
from fl_privacy.federation.packing import Packing
from fl_privacy.federation.participant import Participant
from fl_privacy.federation.server import Failure, Server
from fl_privacy.types import Tensors, Upload


def run_encrypted(
    server: Server,
    participants: Mapping[int, Participant],
    *,
    rounds: int,
    on_round: Callable[[RoundReport], None],
    bits: int = 16,
) -> dict[int, ClientState]:
    """Train ``server.state`` for ``rounds`` rounds under CKKS; returns what each client kept for itself.

    Each client scales its update by its share of the round's examples and by the largest value that any client has in
    the tensor, which all tell, packs and encrypts it; the server adds the ciphertexts; the clients, who share the
    secret key, decrypt the sum. ``server.state`` is what they make of it, which
    the server itself does not learn. Seconds of encryption, addition and decryption are those of the defense.

    Args:
        server: holds the model and the rules; adding is all that its machine does.
        participants: the clients.
        rounds: how many.
        on_round: told of each round.
        bits: of a quantized value.

    Raises:
        UserError: TenSEAL is missing, a setting is out of range, or all clients of a round failed.
    """
    keys = KeyHolder()
    adder = Adder(keys.public_context())
    kept = {client: ClientState() for client in participants}
    for round in range(1, rounds + 1):
        started, crypto = time.perf_counter(), 0.0
        asked = server.select(round)
        results: dict[int, LocalResult | Failure] = {}
        for client in asked:
            state = ClientState(dict(kept[client].tensors))
            work = partial(participants[client].update, server.sent_to(client), state, round=round)
            results[client] = _finite(attempt(work))
            if isinstance(results[client], LocalResult):
                kept[client] = state
        sound = {c: r for c, r in results.items() if isinstance(r, LocalResult)}
        if not sound:
            raise UserError("At least one usable update is expected in a round, but all clients failed; fix them.")
        packing = Packing(bits=bits, summands=len(sound))
        total = sum(r.upload.num_examples for r in sound.values())
        began = time.perf_counter()
        shares = [r.upload.num_examples / total * _flat(r.upload) for r in sound.values()]
        like = next(iter(sound.values())).upload
        largest = _largest(shares, like)
        uploads = [keys.encrypt(packing.pack(share / largest)) for share in shares]
        summed = keys.decrypt(adder.add(uploads))
        mean = largest * packing.unpack(summed, len(largest), summands=len(sound))
        crypto = time.perf_counter() - began
        server.receive({min(sound): _shaped(mean, like, total)})
        report = RoundReport(
            round=round,
            clients=tuple(sound),
            excluded={c: r.reason for c, r in results.items() if isinstance(r, Failure)},
            train_loss=sum(r.train_loss for r in sound.values()) / len(sound),
            seconds=time.perf_counter() - started,
            defense_seconds=crypto + sum(r.defense_seconds for r in sound.values()),
            upload_bytes=sum(len(c) for upload in uploads for c in upload),
        )
        on_round(settled(report, settle(server, participants, kept, round)) if server.personal else report)
    return kept


def _finite(result: LocalResult | Failure) -> LocalResult | Failure:
    if isinstance(result, LocalResult) and not bool(_flat(result.upload).isfinite().all()):
        return Failure("its update is not finite")
    return result


def _flat(upload: Upload) -> Tensor:
    return torch.cat([t.flatten().double() for t in _all(upload)])


def _largest(shares: Sequence[Tensor], like: Upload) -> Tensor:
    """(N,) the largest absolute value that any client has in the tensor of each element; 1 where all are zero."""
    peaks = torch.stack(list(shares)).abs().amax(0).split([t.numel() for t in _all(like)])
    each = [peak.amax().expand(len(peak)) if len(peak) else peak for peak in peaks]
    largest = torch.cat(each)
    return torch.where(largest > 0, largest, 1.0)


def _all(upload: Upload) -> Sequence[Tensor]:
    return [*upload.tensors.values(), *upload.buffers.values()]


def _shaped(values: Tensor, like: Upload, num_examples: int) -> Upload:
    pieces = iter(values.split([t.numel() for t in _all(like)]))

    def shaped(tensors: Tensors) -> dict[str, Tensor]:
        return {name: next(pieces).view_as(t).to(t.dtype) for name, t in tensors.items()}

    return Upload(tensors=shaped(like.tensors), buffers=shaped(like.buffers), num_examples=num_examples)
