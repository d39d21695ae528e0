"""How programs of `hopper_decode` finish a request and KV head: write the result, or combine partial results.

    request and head   | program 4 | program 5 ........... | program 6 |      each may have some of its tiles
    workspace          | .. | 4: begin, end of its share | 5: .. | 6: .. |     [programs, 2, group, d]

The last program to arrive combines what the others wrote. Knows tile ranges and the workspace, no queries or keys.
"""

from __future__ import annotations

from saccade.kernels.launch.gluon_compat import aggregate, barrier, gl, gluon


@aggregate
class Sizes:
    """What the kernel is compiled for."""

    HEADS: gl.constexpr  # KV heads
    GROUP: gl.constexpr  # query heads per KV head
    ROWS: gl.constexpr  # the group, padded
    BLOCK: gl.constexpr  # tokens of a KV block
    STAGES: gl.constexpr
    PARTS: gl.constexpr  # split-K partials of the QKV projection
    DIM: gl.constexpr  # of a head
    ROTARY: gl.constexpr  # dimensions of a head that rotate, the first ones
    QKV_ROW: gl.constexpr  # stride of the QKV projection
    EPS: gl.constexpr  # of norms of heads


@aggregate
class Output:
    out: gl.tensor
    mixed: gl.tensor  # the workspace: sums of values, maxima, sums of weights
    maxima: gl.tensor
    sums: gl.tensor
    counters: gl.tensor


@aggregate
class Accumulator:
    acc: gl.tensor  # [DIM, ROWS]: sums of values
    total: gl.tensor  # sums of weights
    largest: gl.tensor  # [ROWS]: the maximum that weights are relative to


@aggregate
class Partition:
    """How all tiles are divided: `larger` programs have one tile more than `share`."""

    share: gl.tensor
    larger: gl.tensor

    @gluon.jit
    def begin(self, program: gl.tensor) -> gl.tensor:
        return program * self.share + gl.minimum(program, self.larger)

    @gluon.jit
    def owner(self, tile: gl.tensor) -> gl.tensor:
        """The program that has this tile."""
        after = tile - self.larger * (self.share + 1)
        return gl.where(after < 0, tile // (self.share + 1), self.larger + after // gl.maximum(self.share, 1))


@gluon.jit
def finish(
    output: Output, ours: Accumulator, cell: gl.tensor, begin: gl.tensor, tiles: gl.tensor, count: gl.tensor,
    partition: Partition, is_first: gl.tensor, sizes: Sizes,
) -> None:  # fmt: skip
    """Write the result, or a partial one: slot 0 is for where the program's share begins, 1 for where it ends.

    A request and head has `tiles` from `begin` on, among all tiles; `count` of them are this program's.
    """
    if count == tiles:
        _write(output.out, cell, ours.acc, ours.total, sizes)
    else:
        _write_partial(output, 2 * gl.program_id(0) + 1 - is_first, ours, sizes)
        head = partition.owner(begin)
        tail = partition.owner(begin + tiles - 1)
        if gl.atomic_add(output.counters + cell, 1, sem="acq_rel") == tail - head:
            began = begin != partition.begin(head)  # the first program had others before
            acc, total = _combine(output, ours, 2 * head + began.to(gl.int32), head, tail, sizes)
            _write(output.out, cell, acc, total, sizes)
            gl.store(output.counters + cell, 0)


@gluon.jit
def _write(out: gl.tensor, cell: gl.tensor, acc: gl.tensor, total: gl.tensor, sizes: Sizes) -> None:
    S: gl.constexpr = acc.type.layout
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, S))[None, :]
    dims = gl.arange(0, sizes.DIM, layout=gl.SliceLayout(1, S))[:, None]
    found = acc / gl.where(total > 0, total, 1.0)[None, :]
    target = out + cell.to(gl.int64) * (sizes.GROUP * sizes.DIM) + rows * sizes.DIM + dims
    gl.store(target, found.to(out.dtype.element_ty), mask=(rows < sizes.GROUP) & (dims >= 0))


@gluon.jit
def _write_partial(output: Output, slot: gl.tensor, ours: Accumulator, sizes: Sizes) -> None:
    """The barrier at the end: all threads have stored before one of them counts this program."""
    S: gl.constexpr = ours.acc.type.layout
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, S))
    dims = gl.arange(0, sizes.DIM, layout=gl.SliceLayout(1, S))[:, None]
    part = slot * sizes.GROUP + rows
    inside = (rows < sizes.GROUP)[None, :] & (dims >= 0)
    gl.store(output.mixed + part[None, :] * sizes.DIM + dims, ours.acc, mask=inside)
    gl.store(output.maxima + part, ours.largest, mask=rows < sizes.GROUP)
    gl.store(output.sums + part, ours.total, mask=rows < sizes.GROUP)
    barrier()


@gluon.jit
def _combine(
    output: Output, like: Accumulator, first: gl.tensor, head: gl.tensor, tail: gl.tensor, sizes: Sizes
) -> gl.tuple:
    """The partial results of programs `head` to `tail`, in their order. Other SMs wrote them: loads bypass L1."""
    S: gl.constexpr = like.acc.type.layout
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, S))
    dims = gl.arange(0, sizes.DIM, layout=gl.SliceLayout(1, S))[:, None]
    acc = like.acc * 0.0
    total = like.total * 0.0
    largest = gl.full_like(like.largest, -1e30)
    inside = (rows < sizes.GROUP)[None, :] & (dims >= 0)
    for program in range(head, tail + 1):
        part = gl.where(program == head, first, 2 * program) * sizes.GROUP + rows
        each_largest = gl.load(output.maxima + part, mask=rows < sizes.GROUP, other=-1e30, cache_modifier=".cg")
        each_total = gl.load(output.sums + part, mask=rows < sizes.GROUP, other=0.0, cache_modifier=".cg")
        each = gl.load(output.mixed + part[None, :] * sizes.DIM + dims, mask=inside, other=0.0, cache_modifier=".cg")
        larger = gl.maximum(largest, each_largest)
        shrink = gl.exp2(largest - larger)
        weight = gl.exp2(each_largest - larger)
        acc = acc * shrink[None, :] + each * weight[None, :]
        total = total * shrink + each_total * weight
        largest = larger
    return acc, total
