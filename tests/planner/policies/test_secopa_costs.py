"""SeCoPa's decisions with the constants of HiPress' repository."""

from __future__ import annotations

import random

import pytest

from gckernels.planner.policies.secopa import (
    Exchange,
    Primitive,
    SecopaCosts,
    SecopaDecision,
    decide,
)

NODES = (4, 8, 16)
SERVER, RING = Exchange.SERVER, Exchange.RING

# milliseconds: each element, none, and the least where that matters
ENCODE, DECODE, HOP = (1.4133e-8, 5.8938e-2, 0.05408), (6.2041e-9, 1.3956e-1, 0.07287), (8.5005e-7, 2.0337e-1, 0.09766)
GATHER = {4: (2.7156e-6, 0.4193, 0.15573), 8: (6.1167e-6, 0.80768, 0.28778), 16: (1.2937e-5, 1.4406, 0.59503)}
BROADCAST = {4: (2.7157e-6, 0.22156, 0.1482), 8: (6.1172e-6, 0.27285, 0.29666), 16: (1.2915e-5, 0.45538, 0.58353)}


def published_costs(nodes):
    """TernGrad with 2 bits on V100s, links of about 38 Gbit/s; in milliseconds.

    Decoding is evaluated at the size of the payload, with a slope that was probably fitted to raw elements.
    """
    lines = (ENCODE, DECODE, GATHER[nodes], BROADCAST[nodes], HOP)
    return SecopaCosts(nodes, *(Primitive(none, each, least) for each, none, least in lines), ratio=1 / 16)


def cost(line, numel):
    each, none, overhead = line
    return overhead if numel < max(0, (overhead - none) / each) else each * numel + none


def restated(numel, nodes, exchange):
    """The decision, from the published lines one by one."""
    best = {False: (float("inf"), 0), True: (float("inf"), 0)}
    for parts in range(1, nodes + 1):
        raw, sent = numel / parts, numel / 16 / parts
        for compress, size in ((False, raw), (True, sent)):
            if exchange == SERVER:
                total = cost(GATHER[nodes], size) + cost(BROADCAST[nodes], size)
                encodings, decodings = min(parts + 1, nodes), min(nodes - 1 + parts, 2 * (nodes - 1))
            else:
                total, encodings, decodings = 2 * (nodes - 1) * cost(HOP, size), nodes, nodes
            if compress:
                total += encodings * cost(ENCODE, raw) + decodings * cost(DECODE, sent)
            best[compress] = min(best[compress], (total, parts))
    compress = best[True][0] < best[False][0]
    return SecopaDecision(compress, best[compress][1])


@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize("nodes", NODES)
def test_decisions_are_those_of_the_published_lines(nodes, exchange):
    costs, draw = published_costs(nodes), random.Random(nodes)
    for _ in range(200):
        numel = int(10 ** draw.uniform(0, 8.7))
        assert decide(numel, costs, exchange) == restated(numel, nodes, exchange), numel


@pytest.mark.parametrize(
    ("exchange", "nodes", "megabytes"),
    [(SERVER, 4, 2.8), (SERVER, 8, 5.1), (SERVER, 16, 10.0), (RING, 4, 2.7), (RING, 8, 4.6), (RING, 16, 8.6)],
)
def test_compression_starts_at_the_published_sizes(exchange, nodes, megabytes):
    """The sizes come from a scan in steps of some percent."""
    costs = published_costs(nodes)
    low, high = 1, 1 << 27
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decide(middle, costs, exchange).compress else (middle, high)
    assert 4 * high / 1e6 == pytest.approx(megabytes, rel=0.025)


def test_servers_get_more_parts_for_larger_gradients():
    costs = published_costs(16)
    parts = [decide(numel, costs, SERVER).parts for numel in range(2_600_000, 20_000_000, 100_000)]
    assert parts == sorted(parts) and parts[0] == 5 and parts[-1] == 16
    assert decide(int(69e6 / 4 * 1.02), costs, SERVER).parts == 16
    assert decide(int(69e6 / 4 * 0.9), costs, SERVER).parts < 16


@pytest.mark.parametrize("nodes", NODES)
def test_a_ring_always_has_a_part_for_each_node(nodes):
    costs = published_costs(nodes)
    assert {decide(1 << power, costs, RING).parts for power in range(8, 28)} == {nodes}
