"""Canaries beside a Flower app's own clients: what one training lets through its mods bounds epsilon from below."""

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from fl_privacy.flower.audit_protocol import numbers_of
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, stated_by, together
from fl_privacy.flower.inside.identity import identity_put_back
from fl_privacy.flower.records import PARTITION
from fl_privacy.rng import derive_generator, streams_put_back
from fl_privacy.runs.folder.claims import records_of, write_claims
from fl_privacy.types import Tensors

logger = logging.getLogger(__name__)

CANARIES = "fl-privacy.canaries"
"""Record of ``context.state``: how many rounds canaries took part in, and the seed that they are drawn from."""

SCORES = "fl-privacy.canary-scores"
"""Record of ``context.state``: the scores of canaries so far."""

MOST_SECONDS = 60
"""For the canaries of a round: a model of very many arrays, which a server chooses, holds up no node for longer."""

MOST_SCORES = 100_000
"""Of canaries in ``context.state``; in later rounds none take part."""

MOST_COORDINATES = 20_000
"""Values of an update, of each array the first ones, in which canaries lie: noise is the same in all of them."""


def canary_mod(
    *mods: Mod,
    clip_norm: float | None = None,
    number: int = 500,
    delta: float = 1e-5,
    claimed: float | None = None,
    partition: int = 0,
    out: str | Path | None = None,
) -> Mod:
    """Build a mod that does what ``mods`` do, and sends canary clients through them after each training of one node.

    A canary is a client whose update is a direction of its own, as long as the clipping norm; it takes part with
    probability 1/2, or else its update is nothing. What of it comes out of ``mods`` is compared with its direction.
    With ``claimed`` the same canaries take part in all rounds, and their scores are added up: the claim is about the
    training. Without, each round has canaries of its own, and the claim is that of the mods, about one round.
    No canary is sent: replies, and the random streams of PyTorch, NumPy and Python, are as without them. Scores and
    the seed are in ``context.state``, which stays on the node.

    ``ClientApp(mods=[canary_mod(LocalDpMod(...), out="claims")])``

    Args:
        mods: that protect an update, the outermost first, as ``ClientApp(mods=...)`` takes them.
        clip_norm: l2 norm to which they clip; ``None`` takes that of Flower's ``LocalDpMod`` among them.
        number: of canaries, at least 20.
        delta: in (0, 1), of ``claimed``; what the mods claim is tested at their own.
        claimed: epsilon of the whole training against whoever reads this node's replies; ``None`` takes what the mods
            claim.
        partition: of the node where canaries take part; others pass their messages through ``mods`` alone.
        out: folder for ``claim.json`` and ``claim.html``, written anew after each round; ``None`` writes none.

    Raises:
        UserError: no mod is given, nobody says to which norm they clip, or an epsilon is claimed of mods that add no
            noise, which is then the server's and not in a reply.
    """
    norm = _norm_of(mods) if clip_norm is None else clip_norm
    _expect_usable(mods, norm=norm, number=number, delta=delta, claimed=claimed)
    all_of_them = together(mods)

    def in_front(message: Message, context: Context, like: Tensors) -> None:
        # Copies, as mods may have random streams or counters of their own.
        _let_pass(together(deepcopy(mods)), message, context, like, norm=norm, number=number, same=claimed is not None)
        if out is not None:
            write_canaries(context, Path(out), mods=mods, delta=delta, claimed=claimed)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        training = message.metadata.message_type.partition(".")[0] == "train"
        here = training and context.node_config.get(PARTITION, partition) == partition
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


def _expect_usable(mods: Sequence[Mod], *, norm: float, number: int, delta: float, claimed: float | None) -> None:
    checks.whole("number", number, at_least=20, at_most=100_000, example=500)
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.number("clip_norm", norm, above=0, example=1.0)
    if claimed is not None and all(mod in (fixedclipping_mod, adaptiveclipping_mod) for mod in mods):
        raise UserError(
            "claimed is expected of mods that add noise, but these only clip: what their strategy promises is about the"
            " model, not about a reply; fl-privacy check-dp my_app.server:strategy."
        )


def canaries_of(context: Context, *, delta: float = 1e-5) -> CanaryTest | None:
    """Say what the canaries of the node with ``context`` show so far; ``None`` before the first round."""
    if SCORES not in context.state.array_records:
        return None
    scores, about = context.state.array_records[SCORES]["scores"].numpy(), _About.of(context)
    taken = np.concatenate([about.coins(round).numpy() for round in range(len(scores) // about.number)])
    return canary_test(scores[taken], scores[~taken], delta=delta, unit="client")


def write_canaries(
    context: Context, folder: Path, *, mods: Sequence[Mod], delta: float = 1e-5, claimed: float | None = None
) -> None:
    """Write ``claim.json`` and ``claim.html`` of what the canaries of ``context`` show into ``folder``."""
    from fl_privacy.report.claims import write_claims_page  # noqa: PLC0415

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
        canaries=canaries_of(context, delta=delta),
        notes=("Canary clients upload an update of the clipping norm; none of it is sent.",),
    )
    records = records_of([verdict])
    folder.mkdir(parents=True, exist_ok=True)
    write_claims(folder, records)
    write_claims_page(records, folder / "claim.html", title=folder.resolve().name)


@dataclass(frozen=True, kw_only=True)
class _About:
    """The settings of canaries that are kept beside their scores.

    Attributes:
        number: of canaries in a round.
        rounds: that they took part in.
        same: whether they are the same in all rounds.
        seed: of their directions and of who takes part; known to this node alone.
    """

    number: int
    rounds: int
    same: bool
    seed: int

    @classmethod
    def of(cls, context: Context) -> "_About":
        kept: Mapping[str, Any] = context.state.config_records[CANARIES]
        return cls(**kept)

    def coins(self, round: int) -> Tensor:
        """Say who takes part in ``round``, from 0: bools (number,)."""
        return torch.rand(self.number, generator=self._rng("coins", round)) < 0.5

    def directions(self, round: int, size: int) -> Iterator[Tensor]:
        """Yield unit vectors (size,), one for each canary.

        Each is scored by its own release, so that they may overlap.
        """
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
            " canary_mod(LocalDpMod(...))."
        )
    for mod in mods:
        stated = stated_by(mod)
        if stated is not None and stated.clip_norm:
            return float(stated.clip_norm)
    raise UserError("canary_mod is expected to know to which l2 norm its mods clip, but none says so; clip_norm=1.0.")


def _like(message: Message, mods: Sequence[Mod]) -> dict[str, Tensor]:
    """Return zeros like the model's arrays, of a large model like the first values of each; none without a model.

    Flower's own mods go by no array's shape: all values come as one array, which takes a fraction of the time.
    """
    if len(message.content.array_records) != 1:
        return {}
    (record,) = message.content.array_records.values()
    sizes = {name: array.shape for name, array in record.items() if array.dtype.startswith("float")}
    total = sum(math.prod(shape) for shape in sizes.values())
    if sizes and all(_module(mod).partition(".")[0] == "flwr" for mod in mods):
        return {next(iter(sizes)): torch.zeros(min(total, MOST_COORDINATES))}
    if total <= MOST_COORDINATES:
        return {name: torch.zeros(tuple(shape)) for name, shape in sizes.items()}
    share = MOST_COORDINATES / total
    return {name: torch.zeros(max(1, int(math.prod(shape) * share))) for name, shape in sizes.items()}


def _module(mod: Mod) -> str:
    return str(getattr(mod, "__module__", type(mod).__module__))


def _let_pass(
    mod: Mod, message: Message, context: Context, like: Tensors, *, norm: float, number: int, same: bool
) -> None:
    """Send this round's canaries through ``mod``, and add their scores to those in ``context.state``."""
    about = _About.of(context) if CANARIES in context.state.config_records else None
    if about is not None and (about.number, about.same) == (number, same):
        scores = context.state.array_records[SCORES]["scores"].numpy()
    else:  # sums over rounds say nothing of one round, nor the other way round
        about, scores = _About(number=number, rounds=0, same=same, seed=secrets.randbits(62)), np.zeros(0)
    if (0 if about.same else len(scores)) + about.number > MOST_SCORES:
        return
    sizes = [value.numel() for value in like.values()]
    directions, taken = about.directions(about.rounds, sum(sizes)), about.coins(about.rounds)
    mechanism = mechanism_of_mod(
        mod,
        config=numbers_of(
            {key: value for record in message.content.config_records.values() for key, value in record.items()}
        ),
    )
    found = np.zeros(about.number)
    ends = time.monotonic() + MOST_SECONDS
    for canary, (direction, there) in enumerate(zip(directions, taken.tolist(), strict=True)):
        if time.monotonic() > ends:
            raise UserError(
                f"{about.number} canaries are expected to pass the mods in {MOST_SECONDS} s, but only {canary} did;"
                " take a smaller number."
            )
        parts = (direction * norm * there).split(sizes)
        sent = mechanism({n: part.view(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)})
        whole = torch.cat([_row(sent.get(name), value) for name, value in like.items()])
        found[canary] = float(whole @ direction.double())
    scores = scores + found if same and len(scores) else np.concatenate([scores, found])
    context.state[CANARIES] = ConfigRecord(asdict(replace(about, rounds=about.rounds + 1)))
    context.state[SCORES] = ArrayRecord({"scores": Array.from_numpy_ndarray(scores)})


def _row(sent: Tensor | None, like: Tensor) -> Tensor:
    """Lay one array of a release in a row of float64; what was withheld is 0."""
    return torch.zeros(like.numel(), dtype=torch.float64) if sent is None else sent.detach().double().flatten()
