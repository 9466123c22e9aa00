"""The pooled key: the only softmax of the package."""

from std.math import fma
from std.memory import bitcast
from std.sys import is_gpu

comptime _LOG2_E = Float32(1.4426950408889634)
# Adding this to a float32 in [-2**21, 2**21] leaves its nearest integer in the
# low bits of the sum.
comptime _ROUND_SHIFT = Float32(12582912.0)
comptime _EXPONENT_BIAS = Int32(127)
comptime _MANTISSA_BITS = 23
# exp of anything lower is below the smallest normal float32 and weighs nothing.
comptime _EXP_FLOOR = Float32(-88.02969)

# A mean below this may have lost digits to subnormal products.
comptime _SMALL = Float32(2.0**-96)


@inline(.always)
def exp_nonpositive[
    width: Int, //
](x: SIMD[.float32, width]) -> SIMD[.float32, width]:
    """Computes e**x for x <= 0, at most 3 * 2**-24 off in relative terms.

    2**n * 2**f with n the nearest integer to x * log2(e); 2**f is a degree-5
    minimax polynomial on [-1/2, 1/2] with p(0) = 1, so that exp(0) is exactly
    1. Each product that feeds a sum is an explicit fma, or exact: the compiler
    would fuse some of them in one kernel and not in another, and every writer
    must produce the same bits.

    Parameters:
        width: Lanes.

    Args:
        x: Exponents. NaN gives NaN; -inf and anything below -88.03 give 0.

    Returns:
        The exponentials.
    """
    comptime Vector = SIMD[.float32, width]
    # The comparison is false for NaN, which therefore passes.
    var clamped = x.lt(Vector(_EXP_FLOOR)).select(Vector(_EXP_FLOOR), x)
    var shifted = fma(clamped, Vector(_LOG2_E), Vector(_ROUND_SHIFT))
    var n = shifted - Vector(_ROUND_SHIFT)
    var f = fma(clamped, Vector(_LOG2_E), -n)
    var p = Vector(0.0013264727247138646)
    p = fma(p, f, Vector(0.009671512688150988))
    p = fma(p, f, Vector(0.05550733743574172))
    p = fma(p, f, Vector(0.2402224208463509))
    p = fma(p, f, Vector(0.6931469775987164))
    p = fma(p, f, Vector(1.0))
    # At the floor n is -127, so the scale below is exactly 0.
    var biased = (
        bitcast[DType.int32, width](shifted)
        - bitcast[DType.int32, 1](_ROUND_SHIFT)
        + _EXPONENT_BIAS
    )
    # A multiplication, not an addition to p's exponent: it keeps NaN a NaN.
    return p * bitcast[DType.float32, width](biased << _MANTISSA_BITS)


@inline(.always)
def pool_members[
    dtype: DType, width: Int, kpool: Int, //
](
    keys: Array[SIMD[dtype, width], kpool],
    gates: Array[SIMD[dtype, width], kpool],
    ape: Array[SIMD[.float32, width], kpool],
) -> SIMD[dtype, width]:
    """Pools `kpool` members, each channel on its own.

    logit[m] = gate[m] + ape[m]; w[m] = exp(logit[m] - max logit);
    pooled = sum w[m] * key[m] / sum w[m]. Float32 throughout, rounded once.
    With one member the weight is 1 whatever the gate holds, so the key itself
    is returned, NaN payload and all.

    Parameters:
        dtype: Element type of keys and gate scores.
        width: Channels.
        kpool: Members.

    Args:
        keys: The members' keys, oldest first.
        gates: Their gate scores.
        ape: The within-pool position embedding, by member.

    Returns:
        The pooled key's channels.
    """
    comptime Vector = SIMD[.float32, width]
    comptime if kpool == 1:
        return keys[0]
    var logits = Array[Vector, kpool](fill=0)
    comptime for m in range(kpool):
        logits[m] = gates[m].cast[DType.float32]() + ape[m]
    var anchor = logits[0]
    comptime for m in range(1, kpool):
        anchor = logits[m].gt(anchor).select(logits[m], anchor)
    var total = Vector(0)
    var weighted = Vector(0)
    comptime for m in range(kpool):
        logits[m] = exp_nonpositive(logits[m] - anchor)
        total += logits[m]
        weighted = fma(logits[m], keys[m].cast[DType.float32](), weighted)
    var pooled = weighted / total
    var size = abs(pooled)
    # NaN fails the first comparison and is looked at again.
    var common = size.lt(Vector(Float32.MAX)) & (
        size.gt(Vector(_SMALL)) | size.eq(Vector(0))
    )
    if not common.reduce_and():
        pooled = common.select(pooled, _pool_scaled(keys, logits, total))
    return _round[dtype](pooled)


@inline(.always)
def _pool_scaled[
    dtype: DType, width: Int, kpool: Int, //
](
    keys: Array[SIMD[dtype, width], kpool],
    weights: Array[SIMD[.float32, width], kpool],
    total: SIMD[.float32, width],
) -> SIMD[.float32, width]:
    """Redoes channels whose weighted sum leaves the range of normal numbers.

    The mean of finite keys is finite and of their size, but on the way to it
    their sum may overflow, and products lose digits among subnormal numbers.
    Keys scaled by a power of two do neither. The mean never leaves the range of
    its members. Infinities and NaN among the members come out as they went in.
    """
    comptime Vector = SIMD[.float32, width]
    var largest = Vector(0)
    comptime for m in range(kpool):
        # A member that weighs nothing must not set the scale of those that do.
        var size = (
            weights[m]
            .eq(0)
            .select(Vector(0), abs(keys[m].cast[DType.float32]()))
        )
        largest = size.gt(largest).select(size, largest)
    var scale = largest.gt(Vector(1)).select(
        Vector(2.0**-32), Vector(2.0**64)
    )
    var weighted = Vector(0)
    comptime for m in range(kpool):
        var key = keys[m].cast[DType.float32]()
        # Scaled, a key that weighs nothing could overflow, and 0 * inf is NaN.
        weighted = fma(
            weights[m], weights[m].eq(0).select(key, key * scale), weighted
        )
    var mean = weighted / total / scale
    mean = mean.gt(largest).select(largest, mean)
    return mean.lt(-largest).select(-largest, mean)


@inline(.always)
def _round[
    width: Int, //, dtype: DType
](value: SIMD[.float32, width]) -> SIMD[dtype, width]:
    """Rounds to nearest even."""
    comptime if dtype == DType.bfloat16 and not is_gpu():
        # x86's own conversion flushes subnormal numbers whatever the mode.
        var bits = bitcast[DType.uint32, width](value)
        var rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding could carry a NaN's payload into its sign.
        var kept = value.eq(value).select(rounded, bits | 0x0040_0000)
        return bitcast[dtype, width]((kept >> 16).cast[DType.uint16]())
    else:
        return value.cast[dtype]()
