"""A client's exchanges in a federation of trees, and its own trees among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.attacks.trees.model import Tree, Trees, read_model
from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One exchange of a client with the server, in one round.

    Attributes:
        reply: new trees alone (bagging), or the model with them at the end (cyclic).
    """

    sent: Trees | None
    reply: Trees


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTree:
    """A tree that the client fitted.

    Attributes:
        before: trees behind its margins.
        base_margin: (K,) initial margins.
        parallel: trees fitted at once, which share the learning rate.
    """

    tree: Tree
    before: tuple[Tree, ...]
    base_margin: np.ndarray
    parallel: int = 1


def read_exchange(sent: bytes, reply: bytes) -> Exchange:
    """Parse one round; ``sent`` is empty if there was no model yet.

    Raises:
        UserError: one of them is no known kind of model.
    """
    return Exchange(sent=read_model(sent) if len(sent) > 1 else None, reply=read_model(reply))


def own_trees(exchanges: Sequence[Exchange]) -> tuple[OwnTree, ...]:
    """Return the trees that the client fitted, in order, each with the trees before it.

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
