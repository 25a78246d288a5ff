"""Two heaps over plain arrays, compiled: one that finds its items again, one of packed integers.

May not know what it orders. The indexed heap orders item numbers by ``(key[item], item)``: `items[:n]` is the heap and
`place[item]` where in it an item stands. The packed heap orders int64 values.
"""

from __future__ import annotations

from .jit import jit
from .spec import F8, I4, I8


@jit
def _before(key: F8, a: int, b: int) -> bool:
    return key[a] < key[b] or (key[a] == key[b] and a < b)


@jit
def up(items: I4, key: F8, place: I4, i: int) -> None:
    """Restore the order after the key of the item at `i` fell."""
    item = items[i]
    while i > 0:
        parent = (i - 1) >> 1
        other = items[parent]
        if not _before(key, item, other):
            break
        items[i] = other
        place[other] = i
        i = parent
    items[i] = item
    place[item] = i


@jit
def down(items: I4, key: F8, place: I4, n: int, i: int) -> None:
    """Restore the order of a heap of `n` after the key of the item at `i` rose."""
    item = items[i]
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and _before(key, items[child + 1], items[child]):
            child += 1
        other = items[child]
        if not _before(key, other, item):
            break
        items[i] = other
        place[other] = i
        i = child
    items[i] = item
    place[item] = i


@jit
def rekey(items: I4, key: F8, place: I4, n: int, item: int, value: float) -> None:
    """Give `item` of a heap of `n` another key."""
    rises = value > key[item]
    key[item] = value
    if rises:
        down(items, key, place, n, place[item])
    else:
        up(items, key, place, place[item])


@jit
def insert(items: I4, key: F8, place: I4, n: int, item: int, value: float) -> None:
    """Add `item` to a heap of `n`, which then has n + 1."""
    key[item] = value
    items[n] = item
    up(items, key, place, n)


@jit
def discard(items: I4, key: F8, place: I4, n: int, item: int) -> None:
    """Take `item` out of a heap of `n`, which then has n - 1."""
    i, last = place[item], items[n - 1]
    if last != item:
        items[i] = last
        place[last] = i
        up(items, key, place, i)
        down(items, key, place, n - 1, place[last])


@jit
def push(heap: I8, n: int, value: int) -> None:
    """Add `value` to a packed heap of `n`."""
    i = n
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= value:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = value


@jit
def sink(heap: I8, n: int, i: int, value: int) -> None:
    """Put `value` at `i` or below it in a packed heap of `n`."""
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value


@jit
def pop(heap: I8, n: int) -> None:
    """Remove the least of a packed heap of `n`."""
    sink(heap, n - 1, 0, heap[n - 1])


@jit
def erase(heap: I8, n: int, value: int) -> None:
    """Remove `value`, which is there, from a packed heap of `n`."""
    i = 0
    while heap[i] != value:
        i += 1
    last = heap[n - 1]
    while i > 0 and heap[(i - 1) >> 1] > last:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    sink(heap, n - 1, i, last)
