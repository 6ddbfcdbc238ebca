"""Use what LLVM offers and Numba does not: conditions on 64 elements as the bits of a word, and prefetching.

Loops that build masks bit by bit are not vectorized well. Here LLVM is handed the comparison of a whole vector, which
it turns into what the processor has: a mask register (AVX-512), a move of sign bits (SSE, AVX), or plain code.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "add_chosen_64",
    "at_least_64",
    "common_bits_64",
    "count_ones",
    "fetch",
    "fetch_to_read",
    "float32_of",
    "leading_zeros",
    "outside_64",
    "put_chosen_64",
    "put_word",
    "trailing_zeros",
]

_WORD = ir.IntType(64)


def _address(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    """Return the address of the 64 elements of a contiguous array from `start`; the caller answers for them."""
    data = context.make_array(array_type)(context, builder, value=array).data
    scalar = context.get_data_type(array_type.dtype)
    return builder.bitcast(builder.gep(data, [start]), ir.VectorType(scalar, 64).as_pointer())


def _vector(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    """Load the 64 elements from `start` on."""
    address = _address(context, builder, array_type, array, start)
    return builder.load(address, align=array_type.dtype.bitwidth // 8)


def _spread(context: Any, builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, 64)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


@intrinsic
def float32_of(typing: Any, bits: Any) -> Any:
    """Return the float32 that has these bits, a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def at_least_64(typing: Any, y: Any, start: Any, bound: Any) -> Any:
    """Return a word whose bit k says y[start + k] >= bound; not checked against the end of `y`."""
    signature = types.uint64(y, types.intp, y.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, limit = arguments
        v = _vector(context, builder, signature.args[0], array, first)
        return builder.bitcast(builder.fcmp_ordered(">=", v, _spread(context, builder, limit)), _WORD)

    return signature, generate


@intrinsic
def outside_64(typing: Any, y: Any, start: Any, above: Any, below: Any) -> Any:
    """Return a word whose bit k says y[start + k] >= above or <= below; not checked against the end of `y`."""
    signature = types.uint64(y, types.intp, y.dtype, y.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, high, low = arguments
        v = _vector(context, builder, signature.args[0], array, first)
        over = builder.fcmp_ordered(">=", v, _spread(context, builder, high))
        under = builder.fcmp_ordered("<=", v, _spread(context, builder, low))
        return builder.bitcast(builder.or_(over, under), _WORD)

    return signature, generate


@intrinsic
def common_bits_64(typing: Any, y: Any, start: Any, mask: Any) -> Any:
    """Return a word whose bit k says that the integer y[start + k] & mask is not 0; the end of `y` is not checked."""
    signature = types.uint64(y, types.intp, y.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, pattern = arguments
        v = builder.and_(_vector(context, builder, signature.args[0], array, first), _spread(context, builder, pattern))
        return builder.bitcast(builder.icmp_unsigned("!=", v, ir.Constant(v.type, None)), _WORD)

    return signature, generate


def _storing_chosen(y: Any, adds: bool) -> Any:
    signature = types.void(y, types.intp, types.uint64, y.dtype, y.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, word, one, zero = arguments
        address = _address(context, builder, signature.args[0], array, first)
        aligned = signature.args[0].dtype.bitwidth // 8
        where_set = builder.bitcast(word, ir.VectorType(ir.IntType(1), 64))
        values = builder.select(where_set, _spread(context, builder, one), _spread(context, builder, zero))
        if adds:
            values = builder.fadd(builder.load(address, align=aligned), values)
        builder.store(values, address, align=aligned)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def put_chosen_64(typing: Any, y: Any, start: Any, word: Any, one: Any, zero: Any) -> Any:
    """Set y[start + k] to `one` where bit k of the word is set, else to `zero`; the end of `y` is not checked."""
    return _storing_chosen(y, adds=False)


@intrinsic
def add_chosen_64(typing: Any, y: Any, start: Any, word: Any, one: Any, zero: Any) -> Any:
    """Add `one` to y[start + k] where bit k of the word is set, else `zero`; the end of `y` is not checked."""
    return _storing_chosen(y, adds=True)


@intrinsic
def put_word(typing: Any, a: Any, start: Any, word: Any) -> Any:
    """Write the bytes of a word, the lowest first, from a[start] on; `a` holds bytes, and its end is not checked."""
    signature = types.void(a, types.intp, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, value = arguments
        data = context.make_array(signature.args[0])(context, builder, value=array).data
        address = builder.bitcast(builder.gep(data, [first]), _WORD.as_pointer())
        ordered = value if sys.byteorder == "little" else builder.bswap(value)
        # eight stores of shifted words take 130 cycles without AVX-512
        builder.store(ordered, address, align=1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def count_ones(typing: Any, word: Any) -> Any:
    """Count the set bits of a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Return the position of the lowest set bit of a 64-bit word; 64 if none is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(typing: Any, word: Any) -> Any:
    """Count the bits of a 64-bit word above the highest set bit; 64 if none is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


def _fetching(a: Any, writes: bool) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, place = arguments
        data = context.make_array(signature.args[0])(context, builder, value=array).data
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        kind, keep, of_data = (ir.Constant(number, n) for n in (int(writes), 3, 1))
        builder.call(function, [builder.bitcast(builder.gep(data, [place]), address), kind, keep, of_data])
        return context.get_dummy_value()

    return types.void(a, types.intp), generate


@intrinsic
def fetch(typing: Any, a: Any, index: Any) -> Any:
    """Fetch the cache line of a[index], to be written soon, without waiting; an index outside of `a` does no harm."""
    return _fetching(a, writes=True)


@intrinsic
def fetch_to_read(typing: Any, a: Any, index: Any) -> Any:
    """Fetch a cache line that is read first, which costs less than fetching it to be written."""
    return _fetching(a, writes=False)
