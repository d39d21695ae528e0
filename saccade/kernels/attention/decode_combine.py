"""What programs of `hopper_decode` find: written if it is whole, otherwise left for the last of them to add up.

    request and head   | program 4 | program 5 ........... | program 6 |      each may have a part of its tiles
    workspace          | .. | 4: began with, ended with | 5: .. | 6: .. |     [programs, 2, group, 128]

Knows shares and cells, not what was multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6


@gluon.jit
def finish(
    found: gl.tuple, ours: gl.tuple, cell: gl.tensor, span: gl.tuple, cut: gl.tuple, is_first: gl.tensor,
    sizes: gl.constexpr,
) -> None:  # fmt: skip
    """Write the result, or leave it where programs leave what they began with (0) or end with (1)."""
    out, counters = found[0], found[4]
    begin, tiles, count = span
    if count == tiles:
        _write(out, cell, ours[0], ours[1], sizes)
    else:
        _leave(found, 2 * gl.program_id(0) + 1 - is_first, ours, sizes)
        head, tail = _owner(begin, cut), _owner(begin + tiles - 1, cut)
        if gl.atomic_add(counters + cell, 1, sem="acq_rel") == tail - head:
            began = begin != head * cut[0] + gl.minimum(head, cut[1])  # the first one had others before
            acc, total = _combined(found, ours, 2 * head + began.to(gl.int32), head, tail, sizes)
            _write(out, cell, acc, total, sizes)
            gl.store(counters + cell, 0)


@gluon.jit
def _owner(tile: gl.tensor, cut: gl.tuple) -> gl.tensor:
    """The program that has this tile of all."""
    share, larger = cut
    behind = tile - larger * (share + 1)
    return gl.where(behind < 0, tile // (share + 1), larger + behind // gl.maximum(share, 1))


@gluon.jit
def _write(out: gl.tensor, cell: gl.tensor, acc: gl.tensor, total: gl.tensor, sizes: gl.constexpr) -> None:
    S: gl.constexpr = acc.type.layout
    rows = gl.arange(0, sizes[2], layout=gl.SliceLayout(0, S))[None, :]
    dims = gl.arange(0, 128, layout=gl.SliceLayout(1, S))[:, None]
    found = acc / gl.where(total > 0, total, 1.0)[None, :]
    place = out + cell.to(gl.int64) * (sizes[1] * 128) + rows * 128 + dims
    gl.store(place, found.to(out.dtype.element_ty), mask=(rows < sizes[1]) & (dims >= 0))


@gluon.jit
def _leave(found: gl.tuple, place: gl.tensor, ours: gl.tuple, sizes: gl.constexpr) -> None:
    """For the last one to add up. No thread goes on before all have stored."""
    _, mixed, maxima, sums, _ = found
    acc, total, largest = ours
    S: gl.constexpr = acc.type.layout
    rows = gl.arange(0, sizes[2], layout=gl.SliceLayout(0, S))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(1, S))[:, None]
    part = place * sizes[1] + rows
    gl.store(mixed + part[None, :] * 128 + dims, acc, mask=(rows < sizes[1])[None, :] & (dims >= 0))
    gl.store(maxima + part, largest, mask=rows < sizes[1])
    gl.store(sums + part, total, mask=rows < sizes[1])
    _meet()


@gluon.jit
def _combined(
    found: gl.tuple, ours: gl.tuple, first: gl.tensor, head: gl.tensor, tail: gl.tensor, sizes: gl.constexpr
) -> gl.tuple:
    """What programs from `head` to `tail` left, in their order. Others wrote it: it is read past the first cache."""
    _, mixed, maxima, sums, _ = found
    acc, total, largest = ours
    S: gl.constexpr = acc.type.layout
    rows = gl.arange(0, sizes[2], layout=gl.SliceLayout(0, S))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(1, S))[:, None]
    acc, total, largest = acc * 0.0, total * 0.0, gl.full_like(largest, -1e30)
    inside = (rows < sizes[1])[None, :] & (dims >= 0)
    for program in range(head, tail + 1):
        part = gl.where(program == head, first, 2 * program) * sizes[1] + rows
        each_largest = gl.load(maxima + part, mask=rows < sizes[1], other=-1e30, cache_modifier=".cg")
        each_total = gl.load(sums + part, mask=rows < sizes[1], other=0.0, cache_modifier=".cg")
        each = gl.load(mixed + part[None, :] * 128 + dims, mask=inside, other=0.0, cache_modifier=".cg")
        larger = gl.maximum(largest, each_largest)
        shrink, weight = gl.exp2(largest - larger), gl.exp2(each_largest - larger)
        acc = acc * shrink[None, :] + each * weight[None, :]
        total, largest = total * shrink + each_total * weight, larger
    return acc, total
