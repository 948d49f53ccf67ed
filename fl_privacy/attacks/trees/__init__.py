"""Reconstruct exact counts, labels, values and whole rows from a client's XGBoost trees."""

from fl_privacy.attacks.trees.counts import (
    FirstTree as FirstTree,
    Leaf as Leaf,
    Training as Training,
    count_first_tree as count_first_tree,
    divide_among_sites as divide_among_sites,
    infer_training as infer_training,
    thresholds as thresholds,
    with_own_base as with_own_base,
)
from fl_privacy.attacks.trees.grid import (
    Exchange as Exchange,
    OwnTree as OwnTree,
    own_trees as own_trees,
    read_exchange as read_exchange,
    read_others as read_others,
)
from fl_privacy.attacks.trees.model import Tree as Tree, Trees as Trees, is_model as is_model, read_model as read_model
from fl_privacy.attacks.trees.reconstruct import (
    Knowledge as Knowledge,
    TreeReconstruction as TreeReconstruction,
    reconstruct_rows as reconstruct_rows,
)
