"""What the kernels must compute, in float64 on the host, and how close is right.

Written from the definition of the pooled key alone; no kernel code is used.
"""

from std.math import exp, frexp, isnan

from copies import DTYPE

comptime _FLOAT32_STEP = 2.0**-24
comptime _BFLOAT16_BITS = 8
# MAX states no accuracy for its kernels.
comptime IN_TREE_SLACK = 4.0


struct Pool(TrivialRegisterPassable):
    """One channel of a pooled key."""

    var exact: Float64
    """Its value."""
    var allowed: Float64
    """How far a kernel may be off."""

    def __init__(
        out self,
        keys: List[Float64],
        logits: List[Float64],
    ):
        var anchor = logits[0]
        var largest_logit = 0.0
        var largest_key = 0.0
        for m in range(len(keys)):
            anchor = max(anchor, logits[m])
            largest_logit = max(largest_logit, abs(logits[m]))
            largest_key = max(largest_key, abs(keys[m]))
        var total = 0.0
        var weighted = 0.0
        for m in range(len(keys)):
            var weight = exp(logits[m] - anchor)
            total += weight
            weighted += weight * keys[m]
        self.exact = weighted / total
        var step = 2.0 ** Float64(Int(frexp(self.exact)[1]) - _BFLOAT16_BITS)
        self.allowed = (
            step
            + (Float64(len(keys)) + 8 + 2 * largest_logit)
            * _FLOAT32_STEP
            * largest_key
        )


struct Verdict(Movable):
    """Compares a kernel's output with what it must be, and keeps the first fault.
    """

    var slack: Float64
    """Factor on the error allowed."""
    var fault: String
    """The first fault; empty if there is none."""
    var worst: Float64
    """The largest error, as a part of what is allowed."""

    def __init__(out self, slack: Float64):
        self.slack = slack
        self.fault = ""
        self.worst = 0

    def near(mut self, what: String, got: Scalar[DTYPE], want: Pool):
        """Requires a pooled channel to be as close as the contract says."""
        var error = abs(got.cast[DType.float64]() - want.exact) / (
            want.allowed * self.slack
        )
        self.worst = max(self.worst, error)
        # NaN fails the comparison too.
        if not error <= 1 and not self.fault:
            self.fault = String(what, ": want ", want.exact, ", got ", got)

    def same[
        dtype: DType
    ](mut self, what: String, got: Scalar[dtype], want: Scalar[dtype]):
        """Requires a copy, an id or a zero to be exact."""
        if got != want and not self.fault:
            self.fault = String(what, ": want ", want, ", got ", got)


def pool_of(
    keys: List[Scalar[DTYPE]],
    gates: List[Scalar[DTYPE]],
    ape: List[Float32],
    offsets: List[Int],
    channel: Int,
    head_dim: Int,
) -> Pool:
    """Pools one channel.

    Args:
        keys: Key elements.
        gates: Gate scores, at the same offsets.
        ape: Position embedding `[kpool, head_dim]`.
        offsets: Where each member's row starts, oldest first.
        channel: The channel.
        head_dim: Channels per key.

    Returns:
        The channel of the pooled key.
    """
    var members = List[Float64](capacity=len(offsets))
    var logits = List[Float64](capacity=len(offsets))
    for m in range(len(offsets)):
        var at = offsets[m] + channel
        members.append(keys[at].cast[DType.float64]())
        logits.append(
            gates[at].cast[DType.float64]()
            + ape[m * head_dim + channel].cast[DType.float64]()
        )
    return Pool(members, logits)
