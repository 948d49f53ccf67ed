"""What a client sent in each round of a federation of trees, and which trees are its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.attacks.trees.model import Tree, Trees, read_model
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One exchange of a client with the server, in one round.

    Attributes:
        sent: model that the client was given; ``None`` in a round that begins without one.
        reply: what it answered: its new trees alone (bagging), or the model with them at the end (cyclic).
    """

    sent: Trees | None
    reply: Trees


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTree:
    """A tree that the client fitted.

    Attributes:
        tree: as it was sent.
        before: trees that its margins come from.
        base_margin: (K,) what margins begin with.
        parallel: trees fitted at once, which share the learning rate.
    """

    tree: Tree
    before: tuple[Tree, ...]
    base_margin: np.ndarray
    parallel: int = 1


def read_exchange(sent: bytes, reply: bytes) -> Exchange:
    """Read one round; ``sent`` is empty where there was no model yet.

    Raises:
        UserError: one of them is no model that is understood.
    """
    return Exchange(sent=read_model(sent) if len(sent) > 1 else None, reply=read_model(reply))


def own_trees(exchanges: Sequence[Exchange]) -> tuple[OwnTree, ...]:
    """List the trees that the client fitted, in order, each with what it was fitted on top of.

    Raises:
        UserError: the rounds are of different objectives or numbers of features.
    """
    kinds = {(one.reply.objective, one.reply.features, one.reply.classes) for one in exchanges}
    if len(kinds) > 1:
        raise UserError("Rounds of a client are expected to be of one objective and number of features, but differ.")
    found: list[OwnTree] = []
    for one in exchanges:
        given = one.sent.trees if one.sent is not None else ()
        new = list(one.reply.trees)
        if given and len(new) > len(given) and all(a.digest == b.digest for a, b in zip(given, new, strict=False)):
            new = new[len(given) :]
        base = (one.sent or one.reply).base_margin
        first = new[0].round if new else 0
        for tree in new:
            inside = tuple(each for each in new if first <= each.round < tree.round)
            before = tuple(given) + inside
            found.append(OwnTree(tree=tree, before=before, base_margin=base, parallel=one.reply.parallel))
    return tuple(found)
