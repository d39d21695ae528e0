"""The tensors of a checkpoint folder by name, read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.checkpoint.files import weight_files
from saccade.errors import ConfigError
from saccade.models.int4_weights import GroupScales

_INDEX = "model.safetensors.index.json"
_SHOWN = 5  # names listed in an error before it only counts
_OPEN_FILES = 2  # a weight's scale may be in another file
_MAPPED = 128 << 20  # bytes: what was read of a file counts as resident until the file is closed


class StoredTensors(Protocol):
    """What weights are loaded from."""

    @property
    def file_of(self) -> Mapping[str, Path]: ...

    def read(self, name: str) -> Tensor: ...

    def read_fp8(self, name: str, in_blocks: bool) -> tuple[Tensor, Tensor] | None:
        """The tensor in float8, with the checkpoint's scales. None: it is neither in FP8 nor in FP4."""
        ...

    def is_needless(self, name: str) -> bool:
        """Whether a tensor that the model has no place for may be left out."""
        ...


@runtime_checkable
class Int4Tensors(Protocol):
    """Those with weights in INT4."""

    def read_int4(self, name: str) -> tuple[Tensor, GroupScales]:
        """Packed, with scales as the checkpoint has them."""
        ...


class TensorFiles:
    def __init__(self, folder: Path, left_out: tuple[str, ...] = ()) -> None:
        """`left_out`: beginnings of names."""
        self._handles: dict[Path, Any] = {}
        self._read_bytes = 0  # since files were last closed
        self.file_of: dict[str, Path] = {}
        for file in _files(folder):
            names = self._open(file).keys()
            self.file_of |= {name: file for name in names if not name.startswith(left_out)}

    def read(self, name: str) -> Tensor:
        if self._read_bytes > _MAPPED:
            self._handles.clear()
            self._read_bytes = 0
        tensor: Tensor = self._open(self.file_of[name]).get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def read_fp8(self, name: str, in_blocks: bool) -> tuple[Tensor, Tensor] | None:
        return None

    def kind(self, name: str) -> tuple[str, list[int]]:
        """The dtype, as the file has it (such as F8_E4M3), and the shape."""
        tensor = self._open(self.file_of[name]).get_slice(name)
        return str(tensor.get_dtype()), list(tensor.get_shape())

    def is_needless(self, name: str) -> bool:
        return False

    def _open(self, file: Path) -> Any:
        handle = self._handles.pop(file, None) or _open(file)
        self._handles[file] = handle  # the last used is the last to be closed
        for oldest in list(self._handles)[:-_OPEN_FILES]:
            del self._handles[oldest]
        return handle


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return _shards(index)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(filter(Path.is_file, folder.glob("*.safetensors")))
    if not files:
        names = some(p.name for ending in ("bin", "gguf") for p in folder.glob(f"*.{ending}"))
        hint = f"; {names} cannot be read, take the checkpoint in safetensors" if names else ""
        raise ConfigError(f"{folder} holds no .safetensors file{hint}")
    return files


def _shards(index: Path) -> list[Path]:
    names = weight_files(index)
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise ConfigError(
            f"{index.parent} lacks {len(absent)} of the {len(names)} weight files that {_INDEX} names "
            f"({some(absent)}); the download is incomplete, run it again"
        )
    return [index.parent / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged or half-downloaded ({error}); download it again") from error


def some(names: Iterable[str]) -> str:
    """The first few, for an error."""
    first = sorted(names)
    return ", ".join(first[:_SHOWN]) + (", ..." if len(first) > _SHOWN else "")
