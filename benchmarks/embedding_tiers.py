"""Does an embedding come back sooner than it is encoded? `python -m benchmarks.embedding_tiers [--device cuda]`

One image of 1280x960 goes through the encoder stage with random weights of Qwen2-VL-2B's tower: decoded and encoded,
and from each tier. A CPU gets a tower of two layers, a quarter as wide; the embedding is as large. A server is started
if there is one (valkey-server or redis-server). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.encoder_inputs import config, item_of, model_of
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.runner.build_embedding_tiers import open_tiers
from saccade.runner.embedding_tiers.entry import Namespace
from saccade.runner.embedding_tiers.folder import FolderStore
from saccade.runner.embedding_tiers.host import HostTier
from saccade.runner.embedding_tiers.rates import NEVER, EmbeddingTime
from saccade.runner.embedding_tiers.store import Store
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.runner.embedding_tiers.valkey import ValkeyStore
from saccade.runner.embedding_tiers.weights_digest import weights_digest
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.graph_capture import capture_tower
from saccade.types.media import MediaItem, Size

SIZE = Size(1280, 960)
HOST_BYTES = 1 << 28
DAY = 86400.0
ALWAYS = EmbeddingTime(0.0, 0.0)
SLOW = EmbeddingTime(1e6, 0.0)
SERVERS = ("valkey-server", "redis-server")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found)
    parser.add_argument("--layers", type=int, help="of the tower; default: 32 on a GPU, 2 on a CPU")
    parser.add_argument("--folder", help="where the folder tier lies; default: a temporary one")
    parser.add_argument("--url", help="of a running Valkey or Redis server; default: one is started")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    device = torch.device(args.device)
    layers = args.layers or (32 if device.type == "cuda" else 2)
    shape = config(layers) if device.type == "cuda" else config(layers, width=320, heads=4)
    model = model_of(shape, device)
    if device.type == "cuda":
        capture_tower(model)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        result = {"device": _name(device), "layers": layers, **digest_rate(model)}
        result |= host_and_encoder(model, device, args.repeats)
        folder = FolderStore(args.folder or f"{scratch}/embeddings", 1 << 30, DAY)
        result |= store_tier(model, device, folder, args.repeats)
        with server_url(args.url, Path(scratch)) as url:
            if url is not None:
                result |= store_tier(model, device, ValkeyStore(url, DAY), args.repeats)
    show(result)
    return 0


def digest_rate(model: Qwen2VL) -> dict[str, float]:
    weights = model.encoder_weights()
    start = time.perf_counter()
    weights_digest(weights)
    size = sum(own.nbytes for own in weights.values()) / 1e9
    return {"digest_s_per_gb": (time.perf_counter() - start) / size, "tower_gb": size}


def host_and_encoder(model: Qwen2VL, device: torch.device, repeats: int) -> dict[str, float]:
    with stage(model, device, None) as (encoder, tiers):
        item = item_of(SIZE, 0)
        encoded = median_ms(lambda: through(encoder, item), repeats, before=lambda: tiers.host.discard(item.key))
        embedding = through(encoder, item)  # from host memory
        assert encoder.counters.restored == 1, "the tier did not have it"
        host = median_ms(lambda: through(encoder, item), repeats)

        def put() -> None:
            tiers.put(item, embedding, None)

        kept = median_ms(put, repeats, before=lambda: tiers.host.discard(item.key), waits=False)
        size = embedding.nbytes / 1e6
    return {"embedding_mb": size, "encode_ms": encoded, "host_ms": host, "put_ms": kept}


def store_tier(model: Qwen2VL, device: torch.device, store: Store, repeats: int) -> dict[str, float]:
    """Warm: what the system or the server has in memory. Cold: after the system was told to drop the file."""
    with stage(model, device, store) as (encoder, tiers):
        item = item_of(SIZE, 0)
        shape = (item.geometry.slots, tiers.namespace.width)
        tiers.put(item, torch.randn(shape, dtype=model.params.dtype, device=device), None)
        tiers.flush()
        name = tiers.namespace.name(item.key)

        def forget() -> None:
            tiers.host.discard(item.key)

        def forget_all() -> None:
            forget()
            store.make_cold(name)

        warm = median_ms(lambda: through(encoder, item), repeats, before=forget)
        cold = median_ms(lambda: through(encoder, item), repeats, before=forget_all)
        assert encoder.counters.encoded == 0, "the tier did not have it"
        store.remove(name)
        tiers.open(SLOW, NEVER)
        for reason in open_tiers(tiers, model, item.geometry, encoder.max_patches, encoder.place):
            print(reason)
    return {f"{store.label}_ms": warm, f"{store.label}_cold_ms": cold}


@contextmanager
def stage(model: Qwen2VL, device: torch.device, store: Store | None) -> Iterator[tuple[LocalEncoder, EmbeddingTiers]]:
    dtype = str(model.params.dtype).removeprefix("torch.")
    tiers = EmbeddingTiers(
        HostTier(HOST_BYTES, device), store, Namespace(model.config.text.embedding_size, dtype, b"benchmark")
    )
    tiers.open(SLOW, ALWAYS, ALWAYS)
    encoder = LocalEncoder(model, 8192, threads=4, device=device, upload_bytes=1 << 26, tiers=tiers)
    try:
        yield encoder, tiers
    finally:
        encoder.close()


def through(encoder: LocalEncoder, item: MediaItem) -> torch.Tensor:
    encoder.submit([item])
    encoder.advance(None)
    done = encoder.poll()
    assert not done.errors, done.errors
    return done.embeddings[item.key]


def median_ms(
    run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None, *, waits: bool = True
) -> float:
    """`waits`: until the device is done too."""
    laps = []
    for _ in range(repeats + 1):
        before()
        _wait()
        start = time.perf_counter()
        run()
        if waits:
            _wait()
        laps.append(time.perf_counter() - start)
    return statistics.median(laps[1:]) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def server_url(given: str | None, folder: Path) -> Iterator[str | None]:
    found = next((path for name in SERVERS if (path := shutil.which(name))), None)
    if given is not None or found is None:
        yield given
        return
    socket = folder / "server.sock"
    command = [found, "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    try:
        while "eady to accept connections" not in (line := process.stdout.readline()):
            assert line, "the server did not start"
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def show(result: dict[str, float]) -> None:
    encode = result["encode_ms"]
    print(f"decode and encode {encode:9.2f} ms, an embedding of {result['embedding_mb']:.1f} MB")
    for tier in ("host", "folder", "folder_cold", "valkey"):
        if f"{tier}_ms" in result:
            ms = result[f"{tier}_ms"]
            print(f"{tier:17} {ms:9.2f} ms {encode / ms:9.1f}x")
    print(f"{'put':17} {result['put_ms']:9.2f} ms of the step's thread")
    print(f"digest {result['digest_s_per_gb']:.2f} s/GB, tower {result['tower_gb']:.2f} GB")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
