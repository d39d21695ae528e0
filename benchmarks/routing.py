"""Routing policies over simulated replicas: `python -m benchmarks.routing`. No process, no clock, a few seconds.

Each replica serves first come, first served, at 40,000 tokens of work a second, and keeps the images it saw last. Chats
about a catalogue under Zipf's law arrive at random: 1,568 tokens of an image, 32 of a question, 100 of output.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from saccade.engine.replicas import router as routing
from saccade.engine.replicas.router import CallDemand, ImageDemand, PromptDemand, RoutedCall, Router
from saccade.scheduler.cache_log import CacheChanges

RATE = 40_000.0  # tokens of work a second
CATALOGUE = 300
KEPT = 60  # images in the caches of one replica
BLOCK = 392  # large blocks: fewer to simulate
IMAGE_TOKENS = 4 * BLOCK
OUTPUTS = 100


class Policy(NamedTuple):
    name: str
    knows_caches: bool = True
    takes_turns: bool = False
    queue_weight: float = routing.QUEUE_WEIGHT
    load_slack: int = routing.LOAD_SLACK


POLICIES = (
    Policy("turns", takes_turns=True),
    Policy("queued work", knows_caches=False),
    Policy("queue x 1", queue_weight=1.0),
    Policy("queue x 1/2"),
    Policy("queue x 1/4", queue_weight=0.25),
    Policy("queue x 0, bound alone", queue_weight=0.0),
    Policy("queue x 1/2, slack 2,048", load_slack=2_048),
    Policy("queue x 1/2, slack 32,768", load_slack=32_768),
)


class Outcome(NamedTuple):
    encodes: float  # of a request
    mean_ms: float  # to the first token
    p99_ms: float


def demand(image: int) -> CallDemand:
    blocks = tuple(f"{image}/{index}".encode() for index in range(4))
    picture = ImageDemand(f"{image}".encode(), IMAGE_TOKENS, IMAGE_TOKENS)
    return CallDemand((PromptDemand(IMAGE_TOKENS + 32, BLOCK, blocks, (picture,)),), 1, OUTPUTS)


def arrivals(load: float, replicas: int, seed: int, count: int) -> Iterator[tuple[float, int]]:
    """Times and images. A load of 1 is what all replicas could just serve if every image were new to them."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(CATALOGUE)]
    rate = load * replicas * RATE / (2 * IMAGE_TOKENS + 32 + OUTPUTS)
    now = 0.0
    for image in chance.choices(range(CATALOGUE), weights, k=count):
        now += chance.expovariate(rate)
        yield now, image


class Simulation:
    def __init__(self, policy: Policy, replicas: int) -> None:
        self.policy = policy
        self.router = Router(replicas)
        self.free_at = [0.0] * replicas
        self.kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self.events: list[tuple[float, int, RoutedCall]] = []  # first tokens and ends, by time
        self.waits: list[float] = []
        self.encodes = 0

    def route(self, image: int) -> RoutedCall:
        count = len(self.free_at)
        live = [len(self.waits) % count] if self.policy.takes_turns else list(range(count))
        wanted = demand(image)
        if not self.policy.knows_caches:
            (prompt,) = wanted.prompts
            wanted = wanted._replace(prompts=(prompt._replace(blocks=(), images=()),))
        return self.router.place(wanted, live)

    def serve(self, now: float, image: int) -> None:
        self.settle(now)
        placement = self.route(image)
        replica = placement.replica
        kept = self.kept[replica]
        is_new = image not in kept
        self.encodes += is_new
        work = 32 + 2 * IMAGE_TOKENS * is_new
        first = max(now, self.free_at[replica]) + work / RATE
        self.free_at[replica] = first + OUTPUTS / RATE
        self.waits.append(first - now)
        heappush(self.events, (first, len(self.waits), placement))
        heappush(self.events, (self.free_at[replica], -len(self.waits), placement))
        self.keep(image, replica)

    def settle(self, now: float) -> None:
        """First tokens and ends up to now."""
        while self.events and self.events[0][0] <= now:
            _, number, placement = heappop(self.events)
            if number > 0:
                self.router.end_prefill(placement)
            else:
                self.router.remove(placement)

    def keep(self, image: int, replica: int) -> None:
        """Told at once: a request in flight is expected to be cached anyway."""
        kept = self.kept[replica]
        kept[image] = None
        kept.move_to_end(image)
        evicted = kept.popitem(last=False)[0] if len(kept) > KEPT else None
        added = entries(image) if self.policy.knows_caches else ()
        self.router.replicas[replica].apply(CacheChanges(False, added, () if evicted is None else entries(evicted)))

    def finish(self) -> Outcome:
        waits = sorted(self.waits)
        return Outcome(self.encodes / len(waits), statistics.mean(waits) * 1e3, waits[int(len(waits) * 0.99)] * 1e3)


def entries(image: int) -> tuple[bytes, ...]:
    return demand(image).prompts[0].entries


def simulate(policy: Policy, replicas: int, load: float, count: int) -> Outcome:
    defaults = (routing.QUEUE_WEIGHT, routing.LOAD_SLACK)
    routing.QUEUE_WEIGHT, routing.LOAD_SLACK = policy.queue_weight, policy.load_slack
    try:
        simulation = Simulation(policy, replicas)
        for now, image in arrivals(load, replicas, seed=1, count=count):
            simulation.serve(now, image)
        return simulation.finish()
    finally:
        routing.QUEUE_WEIGHT, routing.LOAD_SLACK = defaults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.9, 1.5])
    args = parser.parse_args()
    print(f"{'encodes a request, first token in ms: mean / p99':50}" + "".join(f"{x:>24}" for x in args.loads))
    for policy in POLICIES:
        found = [simulate(policy, args.replicas, load, args.requests) for load in args.loads]
        cells = (f"{one.encodes:.2f}  {one.mean_ms:7.0f} / {one.p99_ms:6.0f}" for one in found)
        print(f"{policy.name:50}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
