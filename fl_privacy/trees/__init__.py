"""What XGBoost's trees give away: exact counts, labels and values, and rows that explain all trees of a client."""

from fl_privacy.trees.counts import FirstTree as FirstTree
from fl_privacy.trees.counts import Leaf as Leaf
from fl_privacy.trees.counts import Training as Training
from fl_privacy.trees.counts import count_first_tree as count_first_tree
from fl_privacy.trees.counts import infer_training as infer_training
from fl_privacy.trees.counts import thresholds as thresholds
from fl_privacy.trees.exchanges import Exchange as Exchange
from fl_privacy.trees.exchanges import OwnTree as OwnTree
from fl_privacy.trees.exchanges import own_trees as own_trees
from fl_privacy.trees.exchanges import read_exchange as read_exchange
from fl_privacy.trees.model import Tree as Tree
from fl_privacy.trees.model import Trees as Trees
from fl_privacy.trees.model import is_model as is_model
from fl_privacy.trees.model import read_model as read_model
from fl_privacy.trees.reconstruct import Knowledge as Knowledge
from fl_privacy.trees.reconstruct import TreeReconstruction as TreeReconstruction
from fl_privacy.trees.reconstruct import reconstruct_rows as reconstruct_rows
