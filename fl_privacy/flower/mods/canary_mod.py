"""Pass made-up client updates (canaries) through mods, to bound epsilon from below."""

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fl_privacy import checks
from fl_privacy.dp_check.canaries import CanaryTest, canary_test
from fl_privacy.dp_check.claims import Claim, recompute
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.audit_protocol import is_training, numbers_of
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, stated_by, together
from fl_privacy.flower.inside.identity import identity_put_back
from fl_privacy.flower.records import PARTITION
from fl_privacy.rng import derive_generator, streams_put_back
from fl_privacy.runs.folder.claims import records_of, write_claims
from fl_privacy.types import Tensors

logger: logging.Logger = logging.getLogger(__name__)
CANARIES = "fl-privacy.canaries"  # record of ``context.state`` with the number of rounds and the seed of canaries
SCORES = "fl-privacy.canary-scores"  # record of ``context.state`` with the scores of canaries
MOST_SECONDS = 60  # limit on a round's canaries, since a server could send a model of very many arrays
MOST_SCORES = 100_000  # largest number of scores in ``context.state``; then canaries stop

MOST_COORDINATES = 20_000
"""Largest number of values in a canary, the first ones of each array, since all have the same noise."""


def canary_mod(
    *mods: Mod,
    clip_norm: float | None = None,
    number: int = 500,
    delta: float = 1e-5,
    claimed: float | None = None,
    noise: Literal["gaussian", "other"] = "gaussian",
    partition: int = 0,
    out: str | Path | None = None,
) -> Mod:
    """Build a mod that applies ``mods`` and, after each training of node ``partition``, passes canaries through them.

    A canary is a made-up update that is never sent. A coin decides if it is zero, or has the clipping norm along its
    own direction; the test guesses the coin from the output of ``mods``. With ``claimed`` the same canaries take part
    in all rounds and test the whole training; else each round has new ones, which test the mods' claims for one round.
    Use it as ``ClientApp(mods=[canary_mod(LocalDpMod(...), out="claims")])``. ``UserError`` if no mod is given, the
    clipping norm is unknown, or an epsilon is claimed without noise.

    Args:
        mods: mods that protect an update, the outermost first.
        clip_norm: l2 norm to which they clip; ``None`` takes that of Flower's ``LocalDpMod`` among them.
        number: number of canaries, at least 20.
        delta: delta in (0, 1) of ``claimed``; claims of the mods are tested at their own delta.
        claimed: epsilon of the whole training against the receiver of this node's replies; ``None`` takes the mods'.
        noise: ``gaussian`` if the mods' claim rests on Gaussian noise, ``other`` to assume nothing.
        out: folder for ``claim.json`` and ``claim.html``, written after each round.
    """
    norm = _norm_of(mods) if clip_norm is None else clip_norm
    checks.whole("number", number, at_least=20, at_most=100_000, example=500)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.number("clip_norm", norm, above=0, example=1.0)
    if claimed is not None and all(mod in (fixedclipping_mod, adaptiveclipping_mod) for mod in mods):
        raise UserError(
            "claimed is expected with mods that add noise, but these only clip: their strategy's claim is about the"
            " model, not about a reply; check it by fl-privacy check-dp my_app.server:strategy."
        )
    checks.one_of("noise", noise, ("gaussian", "other"))
    all_of_them = together(mods)

    def in_front(message: Message, context: Context, like: Tensors) -> None:
        # copies, since mods may have their own random streams or counters
        _let_pass(together(deepcopy(mods)), message, context, like, norm=norm, number=number, same=claimed is not None)
        if out is not None:
            write_canaries(context, Path(out), mods=mods, delta=delta, claimed=claimed, noise=noise)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        here = is_training(message) and context.node_config.get(PARTITION, partition) == partition
        like = _like(message, mods) if here else {}
        reply = all_of_them(message, context, call_next)
        if not like or reply.has_error():
            return reply
        with streams_put_back(), identity_put_back():
            found = attempt(lambda: in_front(message, context, like))
        if isinstance(found, Failure):
            logger.warning("Canaries took no part in this round: %s.", found.reason)
        return reply

    return mod


def canaries_of(
    context: Context, *, delta: float = 1e-5, noise: Literal["gaussian", "other"] = "gaussian"
) -> CanaryTest | None:
    """Return the privacy test from all canaries so far, if any; for canaries and arguments see :func:`canary_mod`."""
    if SCORES not in context.state.array_records:
        return None
    scores, about = context.state.array_records[SCORES]["scores"].numpy(), _About.of(context)
    taken = np.concatenate([about.coins(round).numpy() for round in range(len(scores) // about.number)])
    return canary_test(scores[taken], scores[~taken], delta=delta, unit="client", noise=noise)


def write_canaries(
    context: Context,
    folder: Path,
    *,
    mods: Sequence[Mod],
    delta: float = 1e-5,
    claimed: float | None = None,
    noise: Literal["gaussian", "other"] = "gaussian",
) -> None:
    """Test the claim with the canaries in ``context``; write ``claim.json`` and ``claim.html``. See ``canary_mod``."""
    from fl_privacy.report.inferred import write_claims_page  # noqa: PLC0415

    about = _About.of(context)
    rounds = about.rounds if claimed is not None else 1
    stated = next((found for mod in mods if (found := stated_by(mod, rounds=rounds)) is not None), None)
    claim = None if stated is None else stated.claim
    if claimed is not None:
        claim = Claim(epsilon=claimed, delta=delta, unit="client", rounds=rounds, by="canary_mod")
    elif claim is not None and claim.delta > 0:
        delta = claim.delta
    which = f"over {rounds} round{'s' * (rounds != 1)}" if claimed is not None else "in each round"
    verdict = ClaimVerdict(
        subject=f"a client's mods {which}",
        claim=claim,
        recomputed=None if stated is None else recompute(stated.facts, delta=delta),
        canaries=canaries_of(context, delta=delta, noise=noise),
        notes=("Canary clients upload an update of the clipping norm; none of it is sent.",),
    )
    records = records_of([verdict])
    folder.mkdir(parents=True, exist_ok=True)
    write_claims(folder, records)
    write_claims_page(records, folder / "claim.html", title=folder.resolve().name)


@dataclass(frozen=True, kw_only=True)
class _About:
    number: int
    rounds: int
    same: bool
    seed: int

    @classmethod
    def of(cls, context: Context) -> "_About":
        kept: Mapping[str, Any] = context.state.config_records[CANARIES]
        return cls(**kept)

    def coins(self, round: int) -> Tensor:
        return torch.rand(self.number, generator=self._rng("coins", round)) < 0.5

    def directions(self, round: int, size: int) -> Iterator[Tensor]:
        rng = self._rng("directions", round)
        for _ in range(self.number):
            drawn = torch.randn(size, generator=rng)
            yield drawn / drawn.norm()

    def _rng(self, what: str, round: int) -> torch.Generator:
        return derive_generator(self.seed, "canaries", what, 0 if self.same else round)


def _norm_of(mods: Sequence[Mod]) -> float:
    if not mods:
        raise UserError(
            "canary_mod is expected to be given the mods that protect an update, but got none;"
            " write canary_mod(LocalDpMod(...))."
        )
    for mod in mods:
        stated = stated_by(mod)
        if stated is not None and stated.clip_norm:
            return float(stated.clip_norm)
    raise UserError("canary_mod is expected to know the norm to which mods clip, but none says so; set clip_norm=1.0.")


def _like(message: Message, mods: Sequence[Mod]) -> dict[str, Tensor]:
    """Return zeros shaped like the model's arrays, fewer for a large model; one array if all mods are Flower's own."""
    if len(message.content.array_records) != 1:
        return {}
    (record,) = message.content.array_records.values()
    sizes = {name: array.shape for name, array in record.items() if array.dtype.startswith("float")}
    total = sum(math.prod(shape) for shape in sizes.values())
    packages = {str(getattr(mod, "__module__", type(mod).__module__)).partition(".")[0] for mod in mods}
    if sizes and packages <= {"flwr"}:
        return {next(iter(sizes)): torch.zeros(min(total, MOST_COORDINATES))}
    if total <= MOST_COORDINATES:
        return {name: torch.zeros(tuple(shape)) for name, shape in sizes.items()}
    share = MOST_COORDINATES / total
    return {name: torch.zeros(max(1, int(math.prod(shape) * share))) for name, shape in sizes.items()}


def _let_pass(
    mod: Mod, message: Message, context: Context, like: Tensors, *, norm: float, number: int, same: bool
) -> None:
    about = _About.of(context) if CANARIES in context.state.config_records else None
    if about is not None and (about.number, about.same) == (number, same):
        scores = context.state.array_records[SCORES]["scores"].numpy()
    else:  # sums over rounds and scores of single rounds do not mix
        about, scores = _About(number=number, rounds=0, same=same, seed=secrets.randbits(62)), np.zeros(0)
    if (0 if about.same else len(scores)) + about.number > MOST_SCORES:
        return
    sizes = [value.numel() for value in like.values()]
    directions, taken = about.directions(about.rounds, sum(sizes)), about.coins(about.rounds)
    sent = {key: value for record in message.content.config_records.values() for key, value in record.items()}
    mechanism = mechanism_of_mod(mod, config=numbers_of(sent))
    found = np.zeros(about.number)
    ends = time.monotonic() + MOST_SECONDS
    for canary, (direction, there) in enumerate(zip(directions, taken.tolist(), strict=True)):
        if time.monotonic() > ends:
            raise UserError(
                f"{about.number} canaries are expected to pass the mods in {MOST_SECONDS} s, but only {canary} did;"
                " take a smaller number."
            )
        parts = (direction * norm * there).split(sizes)
        seen = mechanism({n: part.view(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)})
        rows = [seen.get(n, v).detach().double().flatten() for n, v in like.items()]
        found[canary] = float(torch.cat(rows) @ direction.double())
    scores = scores + found if same and len(scores) else np.concatenate([scores, found])
    context.state[CANARIES] = ConfigRecord(asdict(replace(about, rounds=about.rounds + 1)))
    context.state[SCORES] = ArrayRecord({"scores": Array.from_numpy_ndarray(scores)})
