"""Access to arrays through addresses in one record, compiled: what the engine's functions hand each other is a pointer.

May not know what the arrays mean. Handing Numba functions a tuple of twenty arrays costs twenty reference counts a
call, which is more than the simulation itself; a record costs none. The addresses are trusted: whoever fills the root
record keeps the arrays alive and in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

Accessor = Callable[[Any, int], Any]
_ENDLESS = 1 << 40  # the length such a vector claims: it is not known here, and nothing checks it


def _element(builder: Any, root: np.dtype[Any], field: str, size: int, args: Any) -> Any:
    """LLVM: address of element args[1] of the array whose address is `field` of the record args[0]."""
    integer = cgutils.intp_t
    place = builder.ptrtoint(args[0], integer)
    offset = {name: place for name, (_, place, *_) in (root.fields or {}).items()}[field]
    base = builder.load(builder.inttoptr(builder.add(place, integer(offset)), integer.as_pointer()))
    return builder.add(base, builder.mul(args[1], integer(size)))


def record_at(root: np.dtype[Any], field: str, dtype: np.dtype[Any]) -> Accessor:
    """A compiled ``(state, index) -> record``, a reference, of the array that `field` of the root record points at."""
    owner, record = from_dtype(root), from_dtype(dtype)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address = _element(builder, root, field, dtype.itemsize, args)
        return builder.inttoptr(address, context.get_value_type(record))

    return _intrinsic(record(owner, types.int64), generate)


def _intrinsic(signature: Any, generate: Callable[..., Any]) -> Accessor:
    # Numba goes by the names and number of the parameters: those of the call, after the typing context.
    def at(typing: Any, state: Any, index: Any) -> Any:  # noqa: ARG001
        return signature, generate

    return cast(Accessor, intrinsic(at))


def vector_at(root: np.dtype[Any], field: str, dtype: np.dtype[Any]) -> Accessor:
    """A compiled ``(state, index) -> array`` that begins at element `index` of what `field` of the root points at."""
    owner, vector = from_dtype(root), types.Array(from_dtype(dtype), 1, "C")

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = context.make_array(vector)(context, builder)
        address = _element(builder, root, field, dtype.itemsize, args)
        size = context.get_constant(types.intp, dtype.itemsize)
        populate_array(
            array,
            data=builder.inttoptr(address, array.data.type),
            shape=[context.get_constant(types.intp, _ENDLESS)],
            strides=[size],
            itemsize=size,
            meminfo=None,
        )
        return array._getvalue()

    return _intrinsic(vector(owner, types.int64), generate)
