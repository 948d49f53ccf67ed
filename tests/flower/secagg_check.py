"""Whether the installed SecAgg+ tells a server both kinds of key shares of one client, which unmask its upload.

A server that names a node as active and as dropped in the last stage is sent, by a client without a check, shares of
the seed of that node's private mask and of the key of its pairwise masks. Bonawitz et al. (2017, section 6) have
clients agree on one list of survivors first. This runs on nodes in this process alone, on vectors made for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

from fl_privacy.flower.backends import quiet_flower
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid
from fl_privacy.flower.inside.legacy import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
    FitIns,
    GridClientProxy,
    LegacyContext,
    NumPyClient,
    SecAggKey,
    SecAggPlusWorkflow,
    SecAggStage,
    WorkflowKey,
    bytes_to_ndarray,
    ndarrays_to_parameters,
    secaggplus_mod,
)
from fl_privacy.flower.mods.guard_mod import secagg_guard_mod
from fl_privacy.flower.records import PARTITION


@dataclass(frozen=True, kw_only=True, eq=False)
class DoubleListing:
    """Result of listing one client in both lists.

    Attributes:
        recovered: the upload of the one client as the server read it; ``None`` where clients did not answer.
        error: largest distance of its values from those that were uploaded; NaN where nothing was recovered.
        seconds: from the shares to the upload.
        mean: of all uploads, as the protocol gives it; ``None`` where the round did not come to its end.
        refusals: what clients replied that did not answer.
    """

    recovered: np.ndarray | None
    error: float
    seconds: float
    mean: np.ndarray | None
    refusals: tuple[str, ...]


def try_double_listing(uploads: Sequence[np.ndarray], *, victim: int = 0, guarded: bool = False) -> DoubleListing:
    """Run one round of the installed SecAgg+ over ``uploads``, one client each, with ``victim`` in both lists.

    Args:
        uploads: arrays of one shape with values within +-8, at least three.
        victim: index of the client whose upload is to be unmasked.
        guarded: whether clients run ``secagg_guard_mod``.
    """

    def make_client(context: Context) -> Any:
        return _Uploads(uploads[int(context.node_config[PARTITION])]).to_client()

    mods: list[Mod] = [secagg_guard_mod] if guarded else []
    grid = _TwoListsGrid(range(len(uploads)), ClientApp(client_fn=make_client, mods=[*mods, secaggplus_mod]), victim)
    strategy = _Asking(grid, len(uploads))
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    with quiet_flower():
        SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.67, max_weight=1.0)(grid, context)
    started = time.perf_counter()
    recovered = grid.unmasked()
    error = float("nan") if recovered is None else float(np.abs(recovered - uploads[victim]).max())
    return DoubleListing(
        recovered=recovered,
        error=error,
        seconds=time.perf_counter() - started,
        mean=strategy.mean,
        refusals=tuple(grid.refusals),
    )


class _Uploads(NumPyClient):
    """Replies that hold a single array each."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def fit(self, parameters: Any, config: Any) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return [self._array], 1, {}


class _Asking(LegacyStrategy):
    """Asks every node, and keeps the mean."""

    def __init__(self, grid: LocalGrid, nodes: int) -> None:
        self.mean: np.ndarray | None = None
        self._proxies = [GridClientProxy(FIRST_NODE + k, grid, 1) for k in range(nodes)]

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [(proxy, FitIns(ndarrays_to_parameters([]), {})) for proxy in self._proxies]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> tuple[None, dict[str, Any]]:
        (self.mean,) = (bytes_to_ndarray(tensor) for tensor in results[0][1].parameters.tensors)
        return None, {}

    def initialize_parameters(self, client_manager: Any) -> None:
        return None

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return []

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    def evaluate(self, server_round: int, parameters: Any) -> None:
        return None


class _TwoListsGrid(LocalGrid):
    """Names one node in both lists of the last stage, keeps its shares, and hands on what is expected."""

    def __init__(self, clients: Sequence[int], client_app: ClientApp, victim: int) -> None:
        super().__init__(clients, client_app)
        self.refusals: list[str] = []
        self._victim = FIRST_NODE + victim
        self._setup: dict[str, Any] = {}
        self._public: dict[int, bytes] = {}
        self._masked: list[np.ndarray] = []
        self._seeds: list[bytes] = []
        self._keys: list[bytes] = []

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        stages = [message.content.config_records[RECORD_KEY_CONFIGS].get(SecAggKey.STAGE) for message in messages]
        for message, stage in zip(messages, stages, strict=True):
            record = ConfigRecord(dict(message.content.config_records[RECORD_KEY_CONFIGS]))
            if stage == SecAggStage.SETUP:
                self._setup = dict(record)
            if stage == SecAggStage.UNMASK:
                record[SecAggKey.DEAD_NODE_ID_LIST] = [*record[SecAggKey.DEAD_NODE_ID_LIST], self._victim]  # type: ignore[misc]
            message.content = RecordDict({**message.content, RECORD_KEY_CONFIGS: record})
        replies = super().deliver(messages)
        for reply, stage in zip(replies, stages, strict=True):
            if reply.has_error():
                self.refusals.append(reply.error.reason or "no answer")
            else:
                self._keep(reply, str(stage))
        return replies

    def _keep(self, reply: Message, stage: str) -> None:
        record, node = reply.content.config_records[RECORD_KEY_CONFIGS], reply.metadata.src_node_id
        if stage == SecAggStage.SETUP:
            self._public[node] = record[SecAggKey.PUBLIC_KEY_1]  # type: ignore[assignment]
        elif stage == SecAggStage.COLLECT_MASKED_VECTORS and node == self._victim:
            pieces: Any = record[SecAggKey.MASKED_PARAMETERS]
            self._masked = [bytes_to_ndarray(piece) for piece in pieces]
        elif stage == SecAggStage.UNMASK:
            nodes: Any = record[SecAggKey.NODE_ID_LIST]
            shares: Any = record[SecAggKey.SHARE_LIST]
            self._seeds.append(shares[nodes.index(self._victim)])
            self._keys.append(shares[-1])
            record[SecAggKey.NODE_ID_LIST], record[SecAggKey.SHARE_LIST] = nodes[:-1], shares[:-1]

    def unmasked(self) -> np.ndarray | None:
        """Return the victim's upload without its masks; ``None`` where too few shares came."""
        if len(self._keys) < self._setup[SecAggKey.THRESHOLD]:
            return None
        modulus, shapes = self._setup[SecAggKey.MOD_RANGE], get_parameters_shape(self._masked)
        own = pseudo_rand_gen(combine_shares(self._seeds), modulus, shapes)
        vector = parameters_subtraction(self._masked, own)
        key = bytes_to_private_key(combine_shares(self._keys))
        for node, public in self._public.items():
            if node == self._victim:
                continue
            mask = pseudo_rand_gen(generate_shared_key(key, bytes_to_public_key(public)), modulus, shapes)
            undo = parameters_subtraction if self._victim > node else parameters_addition
            vector = undo(vector, mask)
        factor, values = factor_extract(parameters_mod(vector, modulus))
        clip, levels = self._setup[SecAggKey.CLIPPING_RANGE], self._setup[SecAggKey.TARGET_RANGE]
        (found,) = dequantize(values, clip, levels)
        return np.asarray(found) * (levels / factor)
