"""The pooled key: the only softmax of the package.

    logit[m] = gate[m] + ape[m]
    pooled = sum e**(logit[m] - anchor) * key[m] / sum e**(logit[m] - anchor)

channel by channel, in float32 throughout, rounded once. Any anchor gives the same
mean; the largest logit is always safe. The first one saves an exponential and is
used wherever it is as good: where no other logit exceeds it by much, and the mean
is an ordinary number. Which of the two a lane takes depends on that lane alone, and
each product that feeds a sum is an explicit fma, or exact: the compiler would fuse
some of them in one kernel and not in another, and every writer must produce the
same bits.
"""

from std.math import exp2, fma, recip
from std.memory import bitcast
from std.sys import is_gpu

comptime _LOG2_E = Float32(1.4426950408889634)
# Adding this to a float32 in [-2**21, 2**21] leaves the exponent bits of two to
# the power of its nearest integer in the low bits of the sum.
comptime _ROUND_SHIFT = Float32(12582912.0 + 127.0)
comptime _MANTISSA_BITS = 23
# exp of anything lower is below the smallest normal float32 and weighs nothing.
comptime _EXP_FLOOR = Float32(-88.02969)

# With a larger lead, rounding it would cost more digits than the logits have lost.
comptime _MAX_LEAD = Float32(16)
# A mean below this may have lost digits to subnormal products.
comptime _SMALL = Float32(2.0**-96)
# Powers of two that bring keys above and below 1 to where sums are safe, and
# back. Constants of the module, because a power in a function is computed when
# it runs.
comptime _DOWN = Float32(2.0**-32)
comptime _UP = Float32(2.0**64)
comptime _UNDO_DOWN = Float32(2.0**32)
comptime _UNDO_UP = Float32(2.0**-64)
comptime _MAX_LEAD_BITS = bitcast[DType.uint32, 1](_MAX_LEAD)
comptime _SMALL_BITS = bitcast[DType.uint32, 1](_SMALL)
comptime _INFINITY_BITS = bitcast[DType.uint32, 1](Float32.MAX)
comptime _MAGNITUDE = UInt32(0x7FFF_FFFF)


@inline(.always)
def exp_lead[width: Int, //](x: SIMD[.float32, width]) -> SIMD[.float32, width]:
    """Computes e**x for x <= _MAX_LEAD, at most 3 * 2**-24 off in relative terms.

    2**n * 2**f with n the nearest integer to x * log2(e); 2**f is a degree-5
    minimax polynomial on [-1/2, 1/2] with p(0) = 1, so that exp(0) is exactly
    1. A GPU has an instruction for 2**x, exact at 0 and at most 2**-22 off.

    Parameters:
        width: Lanes.

    Args:
        x: Exponents. NaN gives NaN; -inf and anything below -88.03 give 0.

    Returns:
        The exponentials.
    """
    comptime Vector = SIMD[.float32, width]
    comptime if is_gpu():
        return exp2(x * Vector(_LOG2_E))
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
    # At the floor n is -127, whose exponent bits are 0, and so the scale is 0.
    # A multiplication, not an addition to p's exponent: it keeps NaN a NaN.
    return p * bitcast[DType.float32, width](
        bitcast[DType.int32, width](shifted) << _MANTISSA_BITS
    )


struct PoolGuard[width: Int](TrivialRegisterPassable):
    """Remembers of pooled vectors whether the first logit was anchor enough.

    All three are bits of magnitudes, which order as the magnitudes do, with NaN
    above infinity.

    Parameters:
        width: Lanes.
    """

    var lead: SIMD[.uint32, Self.width]
    """The most that a logit exceeded the first one; NaN if that was infinite."""
    var largest: SIMD[.uint32, Self.width]
    """The largest mean."""
    var smallest: SIMD[.uint32, Self.width]
    """The smallest mean, less 1: that lets zero pass."""

    @inline(.always)
    def __init__(out self):
        """Has seen nothing."""
        self.lead = 0
        self.largest = 0
        self.smallest = UInt32.MAX

    @inline(.always)
    def note_lead(mut self, lead: SIMD[.float32, Self.width]):
        """Looks at the logits of one vector.

        Args:
            lead: The most that a logit exceeds the first one, or NaN.
        """
        self.lead = max(self.lead, bitcast[DType.uint32, Self.width](lead))

    @inline(.always)
    def note_mean(mut self, mean: SIMD[.float32, Self.width]):
        """Looks at the means of one vector.

        Args:
            mean: The means.
        """
        var bits = bitcast[DType.uint32, Self.width](mean) & _MAGNITUDE
        self.largest = max(self.largest, bits)
        self.smallest = min(self.smallest, bits - 1)

    @inline(.always)
    def sound(self) -> SIMD[.bool, Self.width]:
        """Tells where all means so far are as good as with the largest logit.

        Returns:
            True in the lanes where they are.
        """
        return (
            self.lead.le(_MAX_LEAD_BITS)
            & self.largest.lt(_INFINITY_BITS)
            & self.smallest.ge(_SMALL_BITS)
        )


@inline(.always)
def weigh_on_first[
    width: Int, kpool: Int, //
](
    mut logits: Array[SIMD[.float32, width], kpool],
    mut guard: PoolGuard[width],
):
    """Turns logits into weights, with the first logit as the anchor.

    Parameters:
        width: Lanes.
        kpool: Members.

    Args:
        logits: The members' logits, oldest first. All but the first become
            weights; the first one weighs 1.
        guard: Notes where the weights must not be used.
    """
    # 0, but NaN if the logit is infinite. The comparisons let NaN stay.
    var lead = logits[0] - logits[0]
    comptime for m in range(1, kpool):
        var above = logits[m] - logits[0]
        lead = above.gt(lead).select(above, lead)
        logits[m] = exp_lead(above)
    guard.note_lead(lead)


@inline(.always)
def mean_on_first[
    width: Int, kpool: Int, //
](
    keys: Array[SIMD[.float32, width], kpool],
    weights: Array[SIMD[.float32, width], kpool],
    mut guard: PoolGuard[width],
) -> SIMD[.float32, width]:
    """Takes the mean of members of which the first one weighs 1.

    Parameters:
        width: Lanes.
        kpool: Members.

    Args:
        keys: The members' keys, oldest first.
        weights: Their weights; the first one is not read.
        guard: Notes where the mean must not be used.

    Returns:
        The mean, not rounded yet.
    """
    var total = SIMD[DType.float32, width](1)
    var weighted = keys[0]
    comptime for m in range(1, kpool):
        total += weights[m]
        weighted = fma(weights[m], keys[m], weighted)
    var mean = _divide(weighted, total)
    guard.note_mean(mean)
    return mean


@inline(.always)
def pool_on_largest[
    width: Int, kpool: Int, //
](
    keys: Array[SIMD[.float32, width], kpool],
    logits: Array[SIMD[.float32, width], kpool],
) -> SIMD[.float32, width]:
    """Pools `kpool` members with the largest logit as the anchor.

    Parameters:
        width: Lanes.
        kpool: Members.

    Args:
        keys: The members' keys, oldest first.
        logits: Their logits.

    Returns:
        The mean, not rounded yet.
    """
    comptime Vector = SIMD[.float32, width]
    var anchor = logits[0]
    comptime for m in range(1, kpool):
        anchor = logits[m].gt(anchor).select(logits[m], anchor)
    var weights = Array[Vector, kpool](fill=0)
    var total = Vector(0)
    var weighted = Vector(0)
    comptime for m in range(kpool):
        weights[m] = exp_lead(logits[m] - anchor)
        total += weights[m]
        weighted = fma(weights[m], keys[m], weighted)
    var pooled = _divide(weighted, total)
    var size = abs(pooled)
    # NaN fails the first comparison and is looked at again.
    var common = size.lt(Vector(Float32.MAX)) & (
        size.gt(Vector(_SMALL)) | size.eq(Vector(0))
    )
    if not common.reduce_and():
        pooled = common.select(pooled, _pool_scaled(keys, weights, total))
    return pooled


@inline(.always)
def pool_lanes[
    width: Int, kpool: Int, //
](
    keys: Array[SIMD[.float32, width], kpool],
    logits: Array[SIMD[.float32, width], kpool],
) -> SIMD[.float32, width]:
    """Pools `kpool` members with the anchor that each lane calls for.

    Parameters:
        width: Lanes.
        kpool: Members.

    Args:
        keys: The members' keys, oldest first.
        logits: Their logits.

    Returns:
        The mean, not rounded yet.
    """
    var guard = PoolGuard[width]()
    var weights = logits.copy()
    weigh_on_first(weights, guard)
    var mean = mean_on_first(keys, weights, guard)
    return guard.sound().select(mean, pool_on_largest(keys, logits))


@inline(.always)
def _divide[
    width: Int, //
](weighted: SIMD[.float32, width], total: SIMD[.float32, width]) -> SIMD[
    .float32, width
]:
    """Divides by a sum of weights, which is NaN or at least 1.

    On a GPU an exact division is a call for some operands, and the registers
    saved around it are a spill. A reciprocal and one correction err in the last
    bit at most.
    """
    comptime if is_gpu():
        var reciprocal = recip(total)
        var quotient = weighted * reciprocal
        var corrected = fma(
            fma(-quotient, total, weighted), reciprocal, quotient
        )
        # The correction of an infinity is NaN.
        return corrected.eq(corrected).select(corrected, quotient)
    else:
        return weighted / total


@inline(.always)
def _pool_scaled[
    width: Int, kpool: Int, //
](
    keys: Array[SIMD[.float32, width], kpool],
    weights: Array[SIMD[.float32, width], kpool],
    total: SIMD[.float32, width],
) -> SIMD[.float32, width]:
    """Redoes channels whose weighted sum leaves the range of normal numbers.

    The mean of finite keys is finite and of their size, but on the way to it
    their sum may overflow, and products lose digits among subnormal numbers.
    With weights scaled by a power of two neither happens. The mean never leaves
    the range of its members. Infinities and NaN among the members come out as they
    went in.
    """
    comptime Vector = SIMD[.float32, width]
    var largest = Vector(0)
    comptime for m in range(kpool):
        # A member that weighs nothing must not set the scale of those that do.
        var size = weights[m].eq(0).select(Vector(0), abs(keys[m]))
        largest = size.gt(largest).select(size, largest)
    var is_large = largest.gt(Vector(1))
    var scale = is_large.select(Vector(_DOWN), Vector(_UP))
    var unscale = is_large.select(Vector(_UNDO_DOWN), Vector(_UNDO_UP))
    var weighted = Vector(0)
    comptime for m in range(kpool):
        # Not the keys: one that weighs nothing could overflow, and 0 * inf is NaN.
        weighted = fma(weights[m] * scale, keys[m], weighted)
    var mean = _divide(weighted, total) * unscale
    mean = mean.gt(largest).select(largest, mean)
    return mean.lt(-largest).select(-largest, mean)
