"""A client's own state in Flower's context, which stays on its node."""

import torch
from flwr.app import RecordDict

from fl_privacy.defenses import ClientState
from fl_privacy.flower.records import to_record, to_tensors

MEMORY = "fl-privacy"
"""Name of the record in ``context.state``."""


def load_state(memory: RecordDict, device: torch.device | str = "cpu") -> ClientState:
    """What ``save_state`` kept, on ``device``; empty before the first round."""
    if MEMORY not in memory.array_records:
        return ClientState()
    return ClientState({name: t.to(device) for name, t in to_tensors(memory.array_records[MEMORY]).items()})


def save_state(memory: RecordDict, state: ClientState) -> None:
    """Keep ``state`` for the next round."""
    memory[MEMORY] = to_record(state.tensors)
