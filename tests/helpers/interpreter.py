"""Triton's interpreter without the work that it repeats: the same results, sooner.

It patches `triton.language` at every call of a function inside a kernel, though the kernel's launch has done so, and
builds a table of all types each time it looks one up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _find_once(interpreter._get_np_dtype)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch patches what its kernel sees of the language; functions that it calls, only what is not patched yet."""
    is_running = False
    patched: set[str] = set()

    def patch_missing(fn: Any) -> Any:
        nonlocal is_running
        seen = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        if is_running and seen <= patched:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = patch(fn)
        patched.update(seen)
        if not is_running:
            is_running = True
            restore = scope.restore

            def end() -> None:
                nonlocal is_running
                is_running = False
                restore()

            scope.restore = end
        return scope

    return patch_missing


def _find_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find_unknown(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return find_unknown
