"""The Triton kernels themselves: compiled when first used, for a GPU; see kernels.py for what they are given.

A program works on TURNS blocks of one piece. FULL programs lie wholly inside their piece and, their tensors being
aligned runs of memory, load 16 bytes at a time.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _places(entry, columns, stride, FULL: tl.constexpr):
    """Where entries of a piece lie in a tensor whose rows are `stride` apart; one after the other if FULL."""
    if FULL:
        place = entry
    else:
        place = entry // columns * stride + entry % columns
    return place


@triton.jit
def _row(address, spare, entry, size, columns, stride, TYPE: tl.constexpr, FULL: tl.constexpr):
    """Entries of one task's row; zeros where it owns none (address 0; then any valid address is read instead)."""
    pointer = tl.where(address == 0, spare, address).to(tl.pointer_type(TYPE))
    if FULL:
        row = tl.load(tl.multiple_of(pointer, 16) + entry)
    else:
        row = tl.load(pointer + _places(entry, columns, stride, FULL), mask=entry < size, other=0.0)
    return tl.where(address == 0, tl.zeros_like(row), row)


@triton.jit
def _no_sums(N: tl.constexpr, BLOCK: tl.constexpr):
    sums = ()
    for _ in tl.static_range(N * (N + 1) // 2):
        sums = sums + (tl.zeros([BLOCK], tl.float64),)
    return sums


@triton.jit
def _added(sums, rows, N: tl.constexpr):
    """The sums of products of every two rows, with those of these entries."""
    new = ()
    for i in tl.static_range(N):
        for j in tl.static_range(i + 1):
            new = new + (sums[i * (i + 1) // 2 + j] + rows[i] * rows[j],)
    return new


@triton.jit
def _store(sums, partial, program, N: tl.constexpr):
    """As a symmetric matrix."""
    for i in tl.static_range(N):
        for j in tl.static_range(i + 1):
            total = tl.sum(sums[i * (i + 1) // 2 + j])
            tl.store(partial + program * N * N + i * N + j, total)
            tl.store(partial + program * N * N + j * N + i, total)


@triton.jit
def gram(
    pieces,
    starts,
    sizes,
    columns,
    strides,
    hosts,
    addresses,
    partial,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    FULL: tl.constexpr,
    TYPE: tl.constexpr,
):
    program = tl.program_id(0)
    piece = tl.load(pieces + program)
    start = tl.multiple_of(tl.load(starts + program), BLOCK)
    size = tl.load(sizes + piece)
    width = tl.load(columns + piece)
    spare = tl.load(addresses + piece * N + tl.load(hosts + piece))
    sums = _no_sums(N, BLOCK)
    for turn in tl.static_range(TURNS):
        entry = start + turn * BLOCK + tl.arange(0, BLOCK)
        rows = ()
        for task in tl.static_range(N):
            address, stride = tl.load(addresses + piece * N + task), tl.load(strides + piece * N + task)
            row = _row(address, spare, entry, size, width, stride, TYPE, FULL)
            rows = rows + (row.to(tl.float64),)
        sums = _added(sums, rows, N)
    _store(sums, partial, program, N)


@triton.jit
def update(
    pieces,
    starts,
    sizes,
    columns,
    strides,
    hosts,
    addresses,
    labels,
    weights,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    FULL: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    program = tl.program_id(0)
    piece = tl.load(pieces + program)
    start = tl.multiple_of(tl.load(starts + program), BLOCK)
    size = tl.load(sizes + piece)
    width = tl.load(columns + piece)
    label = tl.load(labels + piece)
    host = tl.load(hosts + piece)
    spare = tl.load(addresses + piece * N + host)
    home = spare.to(tl.pointer_type(TYPE))
    if FULL:
        home = tl.multiple_of(home, 16)
    for turn in tl.static_range(TURNS):
        entry = start + turn * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], WIDE)
        for task in tl.static_range(N):
            address, stride = tl.load(addresses + piece * N + task), tl.load(strides + piece * N + task)
            row = _row(address, spare, entry, size, width, stride, TYPE, FULL)
            weight = tl.where(address == 0, 0.0, tl.load(weights + label * N + task))  # even if it is NaN
            total += weight.to(total.dtype) * row.to(total.dtype)
        place = _places(entry, width, tl.load(strides + piece * N + host), FULL)
        if FULL:
            tl.store(home + place, total.to(TYPE))
        else:
            tl.store(home + place, total.to(TYPE), mask=entry < size)


@triton.jit
def gram_of_matrix(rows, partial, width, N: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """The same as `gram` where the rows are a matrix: each program has TURNS * BLOCK of its columns."""
    program = tl.program_id(0)
    sums = _no_sums(N, BLOCK)
    for turn in tl.static_range(TURNS):
        entry = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        found = ()
        for task in tl.static_range(N):
            found = found + (tl.load(rows + task * width + entry).to(tl.float64),)
        sums = _added(sums, found, N)
    _store(sums, partial, program, N)


@triton.jit
def update_of_matrix(rows, weights, out, width, N: tl.constexpr, BLOCK: tl.constexpr):
    """out = the weighted sum of a matrix's rows."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for task in tl.static_range(N):
        total += tl.load(weights + task).to(tl.float32) * tl.load(rows + task * width + entry).to(tl.float32)
    tl.store(out + entry, total.to(out.dtype.element_ty))
