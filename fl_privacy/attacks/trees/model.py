"""Parse clients' XGBoost models from JSON or UBJSON, without XGBoost and within bounds."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fl_privacy.errors import UserError

LARGEST_MODEL = 64 << 20  # largest number of bytes of a model
MOST_TREES, MOST_NODES = 20_000, 2_000_000  # largest numbers of trees and of their nodes in a model
MOST_FEATURES, MOST_CLASSES = 100_000, 10_000  # most that a model may claim, since lists of that length are allocated
DEEPEST = 256  # largest number of splits between the root and a leaf

LOGISTIC = ("binary:logistic", "binary:logitraw", "reg:logistic")
SQUARED = ("reg:squarederror", "reg:linear")
SOFTMAX = ("multi:softprob", "multi:softmax")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """One decision tree, as arrays with an entry for each node."""

    left: np.ndarray  # left child of each node; -1 in leaves
    right: np.ndarray  # right child; -1 in leaves
    feature: np.ndarray
    threshold: np.ndarray  # rows whose ``feature`` is below it go left
    default_left: np.ndarray
    value: np.ndarray  # leaves' contributions to the margin, with the learning rate
    cover: np.ndarray  # sum of the hessians of the rows in the node
    weight: np.ndarray  # -G / (H + lambda) of inner nodes, without the learning rate
    gain: np.ndarray
    group: int = 0
    round: int = 0

    @cached_property
    def nodes(self) -> np.ndarray:
        found, stack = [], [0]
        while stack:
            node = stack.pop()
            found.append(node)
            if self.left[node] >= 0:
                stack += [int(self.left[node]), int(self.right[node])]
        return np.array(found)

    @cached_property
    def leaves(self) -> np.ndarray:
        return np.asarray(self.nodes[self.left[self.nodes] < 0][::-1])

    @cached_property
    def inner(self) -> np.ndarray:
        return np.asarray(self.nodes[self.left[self.nodes] >= 0])

    @cached_property
    def digest(self) -> bytes:
        parts = (self.left, self.right, self.feature, self.threshold, self.default_left, self.value)
        digest = hashlib.sha256(bytes([self.group % 256]))
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """An ensemble of decision trees."""

    trees: tuple[Tree, ...]
    base_score: tuple[float, ...]  # one, or one for each class; a probability for logistic objectives
    objective: str
    features: int  # number of columns of a row
    classes: int = 1  # number of classes, 1 for a single output
    parallel: int = 1  # number of trees that a boosting round adds for each class
    positive_weight: float = 1.0

    @property
    def base_margin(self) -> np.ndarray:
        base = np.asarray(self.base_score, dtype=float)
        if self.objective in LOGISTIC:
            base = np.clip(base, 1e-12, 1 - 1e-12)
            return np.asarray(np.log(base / (1 - base)))
        return base


def is_model(data: bytes) -> bool:
    """Return whether ``data`` begins like a model of XGBoost."""
    head = data[:256]
    return head[:1] == b"{" and (b'"learner"' in head or b"learner{" in head or b'"Config"' in head)


def read_model(data: bytes) -> Trees:
    """Parse a model of ``Booster.save_raw``, JSON or UBJSON; ``UserError`` if it is too large, damaged or unknown."""
    if len(data) > LARGEST_MODEL:
        raise UserError(
            f"A model is expected to have at most {LARGEST_MODEL >> 20} MiB, but has {len(data) >> 20}; leave it out."
        )
    if data[:1] != b"{":
        raise UserError("XGBoost's JSON or UBJSON is expected, but the model is neither; use Booster.save_raw.")
    try:
        content = read_ubjson(data) if data[1:2] in b"iUIlL" and data[1:2] else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"A model is expected to be JSON, but is damaged: {_plain(error)}; save it again.") from error
    try:
        return _model(content)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise UserError(
            f"A model from Booster.save_raw is expected, but it {_plain(error)}; save it again, or leave it out."
        ) from error


def _plain(error: Exception) -> str:
    said = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return " ".join(said.split())[:200]


def _model(content: Mapping[str, Any]) -> Trees:
    learner = content["learner"]
    booster = learner["gradient_booster"]
    if booster["name"] != "gbtree":
        raise ValueError(f"is of booster {str(booster['name'])[:40]!r}, and only gbtree is read")
    model, about = booster["model"], learner["learner_model_param"]
    classes, features = max(1, int(about["num_class"])), int(about["num_feature"])
    if classes > MOST_CLASSES or not 0 <= features <= MOST_FEATURES:
        raise ValueError(f"has more than {MOST_CLASSES} classes ({classes}) or {MOST_FEATURES} features ({features})")
    if int(about.get("num_target", "1")) > 1:
        raise ValueError("has more than one target")
    given = model["trees"]
    if len(given) > MOST_TREES or sum(len(tree["left_children"]) for tree in given) > MOST_NODES:
        raise ValueError(f"has more than {MOST_TREES} trees or {MOST_NODES} nodes")
    groups = [int(one) for one in model["tree_info"]]
    if len(groups) != len(given) or any(not 0 <= group < classes for group in groups):
        raise ValueError("has trees of no class")
    parallel = int(model["gbtree_model_param"].get("num_parallel_tree", "1"))
    if not 1 <= parallel <= MOST_TREES:
        raise ValueError(f"has {parallel} parallel trees, not 1 to {MOST_TREES}")
    trees = tuple(_tree(one, features, groups[k], k // max(1, classes * parallel)) for k, one in enumerate(given))
    objective = learner["objective"]
    positive_weight = float(objective.get("reg_loss_param", {}).get("scale_pos_weight", 1.0))
    if not 0 < positive_weight < math.inf:
        raise ValueError("has a weight of positives that is no number above 0")
    base_score = tuple(float(part) for part in str(about["base_score"]).strip().strip("[]").split(","))
    if not all(map(math.isfinite, base_score)):
        raise ValueError("has a base score that is no number")
    if len(base_score) not in (1, classes):
        raise ValueError(f"has {len(base_score)} base scores, not 1 or {classes}")
    return Trees(
        trees=trees,
        base_score=base_score,
        objective=str(objective["name"])[:60],
        features=features,
        classes=classes,
        parallel=parallel,
        positive_weight=positive_weight,
    )


def _tree(content: Mapping[str, Any], features: int, group: int, round: int) -> Tree:
    left, right = _array(content["left_children"], int), _array(content["right_children"], int)
    nodes = len(left)
    if not nodes:
        raise ValueError("has a tree without nodes")
    floats = {
        key: _array(content[key], np.float32).astype(np.float64)
        for key in ("split_conditions", "sum_hessian", "base_weights", "loss_changes")
    }
    feature = _array(content["split_indices"], int)
    default = _array(content["default_left"], int) > 0
    parts = [right, feature, default, *floats.values()]
    if any(len(part) != nodes for part in parts):
        raise ValueError("has a tree whose arrays differ in length")
    if any(_array(content.get("split_type", ()), int)):
        raise ValueError("splits by categories, and only splits by thresholds are read")
    inner = left >= 0
    children = np.concatenate([left[inner], right[inner]])
    if (inner != (right >= 0)).any() or (children >= nodes).any() or len(np.unique(children)) < len(children):
        raise ValueError("has a tree whose nodes have wrong children")
    if (children == 0).any() or ((feature < 0) | (feature >= features))[inner].any():
        raise ValueError("has a tree that splits by an unknown feature, or whose root has a parent")
    level = np.zeros(1, dtype=int)
    for _ in range(DEEPEST + 1):
        level = level[left[level] >= 0]
        if not len(level):
            break
        level = np.concatenate([left[level], right[level]])
    else:
        raise ValueError(f"has a tree of more than {DEEPEST} levels")
    if not all(np.isfinite(values).all() for values in floats.values()) or (floats["sum_hessian"] < 0).any():
        raise ValueError("has thresholds, leaves, covers, weights or gains that are no numbers, or covers below 0")
    conditions = floats["split_conditions"]
    return Tree(
        left=left,
        right=right,
        feature=feature,
        threshold=conditions,
        default_left=default,
        value=np.where(left < 0, conditions, 0.0),
        cover=floats["sum_hessian"],
        weight=floats["base_weights"],
        gain=floats["loss_changes"],
        group=group,
        round=round,
    )


def _array(values: Sequence[Any], dtype: Any) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iufb"):
        raise ValueError("has a list that is not of numbers")
    return found.astype(dtype)


MOST_NESTED = 40  # levels of containers; XGBoost's models have eight
MOST_VALUES = 2_000_000  # largest number of values outside of numeric arrays; XGBoost writes some dozens a tree

_NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
_CONSTANTS = {"Z": None, "T": True, "F": False}


def read_ubjson(data: bytes) -> Any:
    """Parse one UBJSON value.

    Memory stays near the size of ``data``. ``UserError`` if the value is damaged, nested too deeply, or of a type that
    XGBoost does not write.
    """
    reader = _Reader(data)
    try:
        value = reader.value(reader.text(1), 0)
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise UserError(f"A model is expected to be whole UBJSON, but is damaged: {error}; save it again.") from error
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.values = data, 0, 0

    def take(self, number: int) -> bytes:
        if number < 0 or self.at + number > len(self.data):
            raise ValueError(f"{number} bytes at {self.at} of {len(self.data)}")
        self.at += number
        return self.data[self.at - number : self.at]

    def text(self, number: int) -> str:
        return self.take(number).decode("utf-8")

    def number(self, kind: str) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def length(self) -> int:
        kind = self.text(1)
        if kind not in "iUIlL":
            raise ValueError(f"a length of type {kind!r}")
        return int(self.number(kind))

    def value(self, kind: str, depth: int) -> Any:
        self.values += 1
        if depth > MOST_NESTED or self.values > MOST_VALUES:
            raise ValueError(f"more than {MOST_NESTED} levels or {MOST_VALUES} values")
        if kind in _NUMBERS:
            return self.number(kind)
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        if kind == "C":
            return self.text(1)
        if kind == "S":
            return self.text(self.length())
        if kind == "[":
            return self.array(depth)
        if kind == "{":
            return self.mapping(depth)
        raise ValueError(f"type {kind!r} at {self.at}")

    def array(self, depth: int) -> Any:
        kind, number = self.header()
        if kind:
            if kind not in _NUMBERS or number is None:
                raise ValueError(f"an array of type {kind!r}")
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(number * dtype.itemsize), dtype).astype(dtype.newbyteorder("="))
        if number is not None:
            if number > len(self.data) - self.at:
                raise ValueError(f"{number} items in {len(self.data) - self.at} bytes")
            return [self.value(self.text(1), depth + 1) for _ in range(number)]
        found = []
        while (mark := self.text(1)) != "]":
            found.append(self.value(mark, depth + 1))
        return found

    def mapping(self, depth: int) -> dict[str, Any]:
        kind, number = self.header()
        if kind or number is not None:
            raise ValueError("an object with a type or a length")
        found: dict[str, Any] = {}
        while self.data[self.at : self.at + 1] != b"}":
            key = self.text(self.length())
            found[key] = self.value(self.text(1), depth + 1)
        self.at += 1
        return found

    def header(self) -> tuple[str, int | None]:
        kind = ""
        if self.data[self.at : self.at + 1] == b"$":
            self.at += 1
            kind = self.text(1)
        if self.data[self.at : self.at + 1] == b"#":
            self.at += 1
            return kind, self.length()
        return kind, None
