"""The ledger of uses, which keeps ranks from overwriting rows that another has not read yet."""

import random

from megatron.parallel.exchange import SLOTS, Ledger

# The order in which products use their ledger; letters are uses.
ROW = "open a, send a, receive a, close a"
COLUMN_BACKWARD = "open a, send a, receive a, open b, send b, close a, receive b, close b"
NESTED = "open a, send a, open b, send b, receive b, receive a, close b, close a"


class Rank:
    """Runs a program step by step, until it has to wait."""

    def __init__(self, lines, *, asks):
        self.steps = [
            (*step.split(), i) for i, line in enumerate(lines) for step in line.split(", ")
        ]
        self.ledger = Ledger(SLOTS)
        self.uses, self.sent, self.closed = {}, set(), set()
        self.asks = asks
        self.at = self.barriers = 0
        self.arrived = -1

    def advance(self, others):
        if self.at == len(self.steps):
            return
        what, *name = self.steps[self.at]
        if what == "open":
            self.uses[tuple(name)] = self.ledger.open()
        use = self.uses[tuple(name)]
        if what == "send":
            if self.asks and not self.ledger.may_send(use):
                self.arrived = self.at
                if any(max(other.at - 1, other.arrived) < self.at for other in others):
                    return
                self.barriers += 1
                self.ledger.met()
            assert use < SLOTS or all(use - SLOTS in other.closed for other in others), (
                "overwritten"
            )
            self.ledger.sent(use)
            self.sent.add(use)
        elif what == "receive":
            if not all(use in other.sent for other in others):
                return
            self.ledger.received(use)
        elif what == "close":
            self.ledger.close(use)
            self.closed.add(use)
        self.at += 1


def barriers(lines, seed, *, size=3, asks=True):
    """Run ranks in random order, some far ahead at times; return the first one's barriers."""
    chosen, ranks = random.Random(seed), [Rank(lines, asks=asks) for _ in range(size)]
    while any(rank.at < len(rank.steps) for rank in ranks):
        rank = chosen.choice(ranks)
        for _ in range(chosen.choice((1, 1, 40))):
            rank.advance([other for other in ranks if other is not rank])
    return ranks[0].barriers


def test_no_rows_are_written_over_before_they_are_read():
    for seed in range(60):
        lines = random.Random(seed).choices([ROW, COLUMN_BACKWARD, NESTED], k=12)
        barriers(lines, seed)


def test_products_need_no_barrier():
    for seed in range(30):
        lines = random.Random(seed).choices([ROW, COLUMN_BACKWARD], k=12)
        assert barriers(lines, seed) == 0
    assert barriers([NESTED] * 6, 0) > 0


def test_without_asking_rows_would_be_written_over():
    broken = 0
    for seed in range(60):
        try:
            barriers([NESTED] * 6, seed, asks=False)
        except AssertionError as error:
            broken += "overwritten" in str(error)
    assert broken
