"""Seconds of secure aggregation by secret sharing, of a client and of the server, beside Refiner's Table 9.

    python experiments/secret_sharing.py --models lenet resnet10 resnet18 --out experiments/rows/secret_sharing

A round of SecAgg+ with the functions that Flower's own mod and workflow are made of, in one process and in their order:
keys, shares of the mask's seed and of the key for every other client, the update in whole numbers under its own mask
and one for every other client; the sum, the seeds put together from the shares, the masks taken off. ``--dropped``
clients leave after the shares, so that the server has to make their masks with all others. Training, messages and the
network are not in it. A client's seconds are the mean over clients, the server's those of the round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from defense_cost import MODELS, Clock
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    factor_extract,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from row_file import RowFile, takes_rows

CLIPPED, LEVELS, MODULUS = 8.0, 1 << 22, 1 << 32
"""What Flower's workflow takes by default: values within 8, their levels, and what sums are taken modulo."""

Arrays = list[np.ndarray]
T = TypeVar("T")


@dataclass(eq=False)
class Party:
    """A client of the protocol, by its number.

    Attributes:
        number: of the client.
        seconds: that it took so far.
        seeds, keys: the shares of the others' seeds and keys that it holds, by their numbers.
    """

    number: int
    seconds: float = 0.0
    seeds: dict[int, bytes] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        """Make two pairs of keys: for masks, and for sealing shares."""
        made = [generate_key_pairs() for _ in range(2)]
        return [(private_key_to_bytes(private), public_key_to_bytes(public)) for private, public in made]

    @cached_property
    def seed(self) -> bytes:
        return os.urandom(32)

    def agreed(self, other: "Party", which: int) -> bytes:
        """Agree on a key with another client, of whom it knows the public keys."""
        return shared_key(self.pairs[which][0], other.pairs[which][1])

    def shares(self, others: list["Party"], threshold: int) -> dict[int, bytes]:
        """Seal a share of its seed and one of its key for every other client; keep its own."""
        seeds = create_shares(self.seed, threshold, len(others))
        keys = create_shares(self.pairs[0][0], threshold, len(others))
        self.seeds[self.number], self.keys[self.number] = seeds[self.number], keys[self.number]
        return {
            other.number: encrypt(self.agreed(other, 1), seeds[other.number] + keys[other.number])
            for other in others
            if other is not self
        }

    def take(self, sealed: bytes, of: "Party") -> None:
        """Open what another client has sealed."""
        opened, length = decrypt(self.agreed(of, 1), sealed), len(self.seeds[self.number])
        self.seeds[of.number], self.keys[of.number] = opened[:length], opened[length:]

    def masked(self, update: Arrays, others: list["Party"]) -> Arrays:
        """Return the update in whole numbers under its own mask and one for every other client."""
        numbers = factor_combine(LEVELS, quantize(update, CLIPPED, LEVELS))
        shapes = [each.shape for each in numbers]
        numbers = parameters_addition(numbers, pseudo_rand_gen(self.seed, MODULUS, shapes))
        for other in others:
            if other is not self:
                mask = pseudo_rand_gen(self.agreed(other, 0), MODULUS, shapes)
                put = parameters_addition if self.number > other.number else parameters_subtraction
                numbers = put(numbers, mask)
        return parameters_mod(numbers, MODULUS)


def shared_key(private: bytes, public: bytes) -> bytes:
    return generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))


def protocol(updates: list[Arrays], threshold: int, dropped: int, clock: Clock) -> tuple[float, float, Arrays]:
    """Run a round in which the last ``dropped`` clients leave; return seconds of client and server, and the mean."""
    parties = [Party(number) for number in range(len(updates))]
    for party in parties:
        timed(party, clock, lambda own: own.pairs)
    sealed = [timed(party, clock, lambda own: own.shares(parties, threshold)) for party in parties]
    for party in parties:
        timed(party, clock, lambda own: [own.take(sealed[o.number][own.number], o) for o in parties if o is not own])
    active = parties[: len(parties) - dropped]
    masked = [timed(party, clock, lambda own: own.masked(updates[own.number], parties)) for party in active]
    started = clock()
    mean = unmasked(masked, active, parties, threshold)
    return statistics.mean(party.seconds for party in active), clock() - started, mean


def timed(party: Party, clock: Clock, work: Callable[[Party], T]) -> T:
    """Return what ``work`` returns of the client, and count its seconds."""
    started = clock()
    found = work(party)
    party.seconds += clock() - started
    return found


def unmasked(masked: list[Arrays], active: list[Party], parties: list[Party], threshold: int) -> Arrays:
    """Add the masked updates up, and take the masks off by the shares that the active clients hold."""
    total = masked[0]
    for each in masked[1:]:
        total = parameters_addition(total, each)
    total, shapes = parameters_mod(total, MODULUS), [each.shape for each in total]
    for party in parties:
        if party in active:
            seed = combine_shares([p.seeds[party.number] for p in active])
            total = parameters_subtraction(total, pseudo_rand_gen(seed, MODULUS, shapes))
            continue
        key = combine_shares([p.keys[party.number] for p in active])
        for other in active:
            mask = pseudo_rand_gen(shared_key(key, other.pairs[0][1]), MODULUS, shapes)
            put = parameters_addition if party.number > other.number else parameters_subtraction
            total = put(total, mask)
    factor, numbers = factor_extract(parameters_mod(total, MODULUS))
    offset = (len(active) - 1) * CLIPPED
    return [(each - offset) * (LEVELS / factor) for each in dequantize(numbers, CLIPPED, LEVELS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet"], choices=MODELS)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--threshold", type=int, default=7, help="shares that put a secret together")
    parser.add_argument("--dropped", nargs="+", type=int, default=[0, 1], help="clients that leave after the shares")
    parser.add_argument("--repeats", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, rng = RowFile(options.out), np.random.default_rng(0)
    for name in options.models:
        model = MODELS[name](in_channels=3, image_size=32, num_classes=10)
        shapes = [tuple(value.shape) for value in model.parameters()]
        one = [rng.normal(0, 0.01, shape) for shape in shapes]
        updates = [one] * options.clients
        for dropped in options.dropped:
            rounds = [protocol(updates, options.threshold, dropped, time.process_time) for _ in range(options.repeats)]
            for _, _, mean in rounds:
                for found, true in zip(mean, one, strict=True):
                    assert np.abs(found - true).max() < 1e-5, "the mean of the updates is what comes out"
            figures = {who: statistics.median(each[k] for each in rounds) for k, who in enumerate(("client", "server"))}
            key = {"model": name, "clients": options.clients, "threshold": options.threshold, "dropped": dropped}
            number = sum(each.size for each in one)
            for who, seconds in figures.items():
                told = {"seconds": seconds, "parameters": number, "microseconds_each": 1e6 * seconds / number}
                kept.add({**key, "who": who}, {**told, "repeats": options.repeats})
            print(key, figures, flush=True)


if __name__ == "__main__":
    main()
