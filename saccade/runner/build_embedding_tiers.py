"""Puts the tiers of embeddings together, measures them beside encoding, and says which are used and why."""

from __future__ import annotations

import logging
import secrets
from importlib import import_module
from typing import NamedTuple

import torch

from saccade import costs
from saccade.errors import ConfigError
from saccade.helpers.free_memory import free_ram
from saccade.models.interface import VisionLanguageModel
from saccade.options.engine import Options
from saccade.runner.device_memory import MemoryPlan
from saccade.runner.embedding_tiers.entry import Namespace, checksum
from saccade.runner.embedding_tiers.folder import FolderStore
from saccade.runner.embedding_tiers.host import PAGE_BYTES, HostTier
from saccade.runner.embedding_tiers.rates import NEVER, EmbeddingTime, best_of, verdict
from saccade.runner.embedding_tiers.store import Store, StoreError
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers, Place
from saccade.runner.embedding_tiers.weights_digest import weights_digest
from saccade.runner.latency_profile import encode_seconds, largest_within
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size

_HOST_GIB = 4.0  # beside a GPU
_HOST_SHARE = 0.1  # of the free memory, if that is less
_MIN_HOST_GIB = 0.0625  # less is not worth it
_STAGED_IMAGES = 4  # that are read from a store or written to it at the same time
_SMALL_PATCHES = 256  # of the images that are measured; sizes between and beyond are on a line
_LARGE_PATCHES = {"cuda": 8192, "cpu": 1024}
_DAY = 86400.0

logger = logging.getLogger("saccade.engine")


def build_tiers(
    model: VisionLanguageModel, options: Options, plan: MemoryPlan, largest: Geometry | None
) -> EmbeddingTiers | None:
    """None: no tier is wanted, or the model takes no images."""
    size = host_bytes(options, plan, largest)
    if model.config.vision is None or largest is None or not size:
        return None
    store = _store(options)
    try:
        host = HostTier(size, plan.device)
    except ConfigError as error:
        if store is not None or options.embedding_host_gb is not None:
            raise
        logger.warning("no embeddings are kept in host memory: %s", error)  # none was asked for
        return None
    width = model.config.text.embedding_size
    weights = weights_digest(model.encoder_weights()) if store is not None else b""  # of use only for others
    dtype = str(plan.dtype).removeprefix("torch.")
    return EmbeddingTiers(host, store, Namespace(width, dtype, weights))


def host_bytes(options: Options, plan: MemoryPlan, largest: Geometry | None) -> int:
    """The size asked for, or a share of free memory beside a GPU. What goes to a store passes through it."""
    size = options.embedding_host_gb
    if size is None:
        size = _automatic_gib(plan)
    num_bytes = int(size * costs.GIB)
    if not options.has_embedding_store or largest is None:
        return num_bytes
    image = largest.slots * plan.scheduler.slot_bytes
    return max(num_bytes, _STAGED_IMAGES * (image + PAGE_BYTES))


def _automatic_gib(plan: MemoryPlan) -> float:
    if plan.device.type != "cuda" or not plan.scheduler.keep_idle_embeddings:
        return 0.0
    size = min(_HOST_GIB, _HOST_SHARE * free_ram() / costs.GIB)
    return size if size >= _MIN_HOST_GIB else 0.0


def _store(options: Options) -> Store | None:
    seconds = options.embedding_days * _DAY
    if options.embedding_dir is not None:
        return FolderStore(options.embedding_dir, int(options.embedding_dir_gb * costs.GIB), seconds)
    if options.embedding_store is None:
        return None
    try:
        module = import_module("saccade.runner.embedding_tiers.valkey")
    except ModuleNotFoundError:
        message = "embedding_store needs the client of Valkey and Redis"
        raise ConfigError(f"{message}; install it: pip install 'saccade[valkey]'") from None
    store: Store = module.ValkeyStore(options.embedding_store, seconds)
    return store


# --- measuring ----------------------------------------------------------------------------------------------


class _Probe(NamedTuple):
    slots: int
    grid: Grid


def open_tiers(
    tiers: EmbeddingTiers, model: VisionLanguageModel, largest: Geometry, max_patches: int, place: Place
) -> tuple[str, ...]:
    """Measure, then let the tiers be used where they pay. Returns lines for the log."""
    table = model.decoder.table
    probes = _probes(model, largest, min(max_patches, _LARGE_PATCHES[table.device.type]))
    encode = EmbeddingTime.through([(probe.slots, encode_seconds(model, probe.grid)) for probe in probes])
    host = EmbeddingTime.through(
        [(probe.slots, _host_seconds(tiers, probe.slots, place, table)) for probe in probes]
    )
    slots = probes[-1].slots
    size = f"{tiers.host.total_bytes >> 20} MiB"
    reasons = [verdict(f"embeddings in {size} of host memory", host, encode, slots)]
    store = NEVER
    if tiers.store is not None:
        try:
            seconds = [(probe.slots, _store_seconds(tiers, probe.slots, place)) for probe in probes]
            store = EmbeddingTime.through(seconds)
            reasons.append(verdict(f"embeddings in {tiers.store.where}", store, encode, slots))
            reasons += filter(None, [tiers.store.advice()])
        except StoreError as error:
            reasons.append(f"embeddings are not kept outside the process until the next start: {error}")
    tiers.open(encode, host, store)
    return tuple(reasons)


def _probes(model: VisionLanguageModel, largest: Geometry, patches: int) -> list[_Probe]:
    """A small image and a large one; where all have one size, that one twice."""
    grids = [largest_within(model.config, largest.grid, limit) for limit in (_SMALL_PATCHES, patches)]
    return [_Probe(max(1, largest.slots * grid.patches // largest.grid.patches), grid) for grid in grids]


def _item(slots: int) -> MediaItem:
    """Stands for an image of so many embeddings, under a name that no image has."""
    geometry = Geometry(Size(1, 1), Grid(1, 1, 1), slots, slots)
    header = Header("rgb", Size(1, 1), 1, 1, "RGB")
    return MediaItem(secrets.token_bytes(32), "image", b"", header, geometry)


def _host_seconds(tiers: EmbeddingTiers, slots: int, place: Place, like: torch.Tensor) -> float:
    item = _item(slots)
    blank = like.new_zeros(slots, tiers.namespace.width)
    if not tiers.host.put(item.key, blank, None):
        return float("inf")  # smaller than one image
    try:
        return best_of(lambda: tiers.from_host(item, place))
    finally:
        tiers.host.discard(item.key)


def _store_seconds(tiers: EmbeddingTiers, slots: int, place: Place) -> float:
    """Seconds to the device, by way of host memory."""
    store = tiers.store
    assert store is not None
    item = _item(slots)
    form = tiers.namespace.form(item)
    name = tiers.namespace.name(item.key)
    blank = [memoryview(bytes(form.embedding_bytes))]

    def read() -> None:
        if not tiers.promote(item) or tiers.from_host(item, place) is None:
            raise StoreError(f"{store.where} did not return what was written to it")

    def forget() -> None:
        tiers.host.discard(item.key)
        store.make_cold(name)

    store.write(name, form.header(name, checksum(blank)), blank)
    try:
        return best_of(read, before=forget)
    finally:
        tiers.host.discard(item.key)
        store.remove(name)
